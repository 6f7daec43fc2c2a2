/*-------------------------------------------------------------------------
 *
 * keys/lease.h
 *	  Leases, the test of ownership, and the end of an operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_LEASE_H
#define IDEMPOTENCY_KEYS_LEASE_H

#include "keys/claim.h"
#include "keys/transaction.h"
#include "store/store.h"

/* How a caller owns the operation that it names. */
typedef struct Ownership
{
	OpenClaim *claim;	/* of this transaction; NULL: it passed the token alone */
	KeyVersion seen;	/* the row to overwrite, if any */
	bytea *fingerprint; /* of the request */
	Lease lease;		/* token 0: a claim without a lease, which has a retention only */
} Ownership;

extern void RequireOwnership(const KeyName *name, const int64 *token, Ownership *own);

/* The part of a function that runs if the caller owns the operation. */
typedef Datum (*OwnerBody)(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own);
extern Datum OwnerCall(FunctionCallInfo fcinfo, int tokenArg, const char *function, OwnerBody body);

extern void LeaseBegin(const ClaimRequest *request, const KeyVersion *seen, KeyRecord *record);
extern void LeaseRelease(const KeyName *name, const Ownership *own);

/* finish.c: the end of an operation */
pg_noreturn extern void ErrorTooLarge(const KeyName *name, const char *what, Size bytes);
extern void ClaimFinish(const KeyName *name, const Ownership *own, KeyRecord *record,
						bool omitLarge);

#endif /* IDEMPOTENCY_KEYS_LEASE_H */
