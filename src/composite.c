/*-------------------------------------------------------------------------
 *
 * composite.c
 *	  Whether a row type in the catalog is as the library fills it.
 *
 * It may be another version's, or somebody may have altered it: a value that is taken
 * for one of another type is a pointer to nowhere.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "composite.h"
#include "errors.h"

/*
 * CompositeCheck throws 42804 unless a row of idempotency."type" has attributes of
 * those types; InvalidOid stands for one that is looked at elsewhere.
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
