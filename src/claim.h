/*-------------------------------------------------------------------------
 *
 * claim.h
 *	  The state machine of one operation, for every room that claims.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLAIM_H
#define IDEMPOTENCY_CLAIM_H

#include "keyname.h"
#include "operation.h"
#include "store.h"
#include "timing.h"

/* What a caller wants of a key. */
typedef struct ClaimRequest
{
	KeyName name;
	bytea *fingerprint; /* NULL matches every other */
	int waitMs;
	Retention retention;
	const Interval *lease; /* NULL: the claim lives and dies with the transaction */
	text *document;		   /* the request, which a lease keeps; or NULL */
} ClaimRequest;

extern Outcome ClaimOrThrow(const ClaimRequest *request, StoredOutcome *stored);
extern bool ClaimAbandoned(ClaimRequest *request, StoredOutcome *stored);
extern bool ClaimAbsent(const KeyName *name, int waitMs, KeyVersion *seen);

#endif /* IDEMPOTENCY_CLAIM_H */
