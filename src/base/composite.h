/*-------------------------------------------------------------------------
 *
 * base/composite.h
 *	  Checking a row type of the catalog before the library fills it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_COMPOSITE_H
#define IDEMPOTENCY_BASE_COMPOSITE_H

#include "access/tupdesc.h"

extern void CompositeCheck(TupleDesc desc, const char *type, const Oid *attributes, int count);

#endif /* IDEMPOTENCY_BASE_COMPOSITE_H */
