/*-------------------------------------------------------------------------
 *
 * base/callable.h
 *	  A function of a user that the extension calls.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_CALLABLE_H
#define IDEMPOTENCY_BASE_CALLABLE_H

#include "fmgr.h"
#include "storage/itemptr.h"

typedef struct Callable
{
	Oid function;
	Oid owner;
	Oid argument; /* the types; both invalid unless it is a function of one argument that */
	Oid result;	  /* returns one value */
	bool strict;
	TransactionId xmin; /* of its row in the catalog */
	ItemPointerData tid;
} Callable;

extern bool CallableFind(Oid function, Callable *found);
extern void CallablePermit(Oid function, Oid role);
extern Datum CallableCall(FmgrInfo *function, Datum argument, bool *isnull);
extern bool CallableIsStale(const Callable *callable);

#endif /* IDEMPOTENCY_BASE_CALLABLE_H */
