/*-------------------------------------------------------------------------
 *
 * lease.h
 *	  Claims that survive commit, and who owns an operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LEASE_H
#define IDEMPOTENCY_LEASE_H

#include "claim.h"
#include "store.h"
#include "xact.h"

/* By what a caller owns the operation that it names. */
typedef struct Ownership
{
	OpenClaim *claim;	/* of this transaction; NULL: by the token alone */
	KeyVersion seen;	/* the row to overwrite, if any */
	bytea *fingerprint; /* of the request */
	Lease lease;		/* token 0: a transactional claim, which has a retention only */
} Ownership;

extern void RequireOwnership(const KeyName *name, const int64 *token, Ownership *own);

/* What a function does for the owner of an operation. */
typedef Datum (*OwnerBody)(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own);
extern Datum OwnerCall(FunctionCallInfo fcinfo, int tokenArg, const char *function, OwnerBody body);

extern void LeaseBegin(const ClaimRequest *request, const KeyVersion *seen, StoredOutcome *stored);
extern void LeaseGiveUp(const KeyName *name, const Ownership *own);

#endif /* IDEMPOTENCY_LEASE_H */
