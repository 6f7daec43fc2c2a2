/*-------------------------------------------------------------------------
 *
 * composite.h
 *	  Whether a row type in the catalog is as the library fills it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_COMPOSITE_H
#define IDEMPOTENCY_COMPOSITE_H

#include "access/tupdesc.h"

extern void CompositeCheck(TupleDesc desc, const char *type, const Oid *attributes, int count);

#endif /* IDEMPOTENCY_COMPOSITE_H */
