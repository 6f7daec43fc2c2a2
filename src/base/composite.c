/*-------------------------------------------------------------------------
 *
 * base/composite.c
 *	  Checking a row type of the catalog before the library fills it.
 *
 * The type can be another version's, or altered: a value of the wrong type would be an
 * invalid pointer.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "base/composite.h"
#include "base/errors.h"

/*
 * CompositeCheck throws 42804 unless a row of idempotency."type" has attributes of these
 * types; InvalidOid matches every type.
 */
void
CompositeCheck(TupleDesc desc, const char *type, const Oid *attributes, int count)
{
	bool fits = desc->natts == count;

	for (int i = 0; fits && i < count; i++)
		fits = !TupleDescAttr(desc, i)->attisdropped &&
			   (!OidIsValid(attributes[i]) || TupleDescAttr(desc, i)->atttypid == attributes[i]);
	if (!fits)
		ErrorRowType(type);
}
