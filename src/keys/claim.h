/*-------------------------------------------------------------------------
 *
 * keys/claim.h
 *	  Claiming an operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_CLAIM_H
#define IDEMPOTENCY_KEYS_CLAIM_H

#include "base/name.h"
#include "keys/operation.h"
#include "settings/timing.h"
#include "store/store.h"

/* A claim that a caller asks for. */
typedef struct ClaimRequest
{
	KeyName name;
	bytea *fingerprint; /* NULL matches every fingerprint */
	int waitMs;
	Retention retention;
	const Interval *lease; /* NULL: the claim ends with the transaction */
	text *document;		   /* the request, which a lease stores; or NULL */
} ClaimRequest;

extern Outcome Claim(const ClaimRequest *request, bool refuses, KeyRecord *record);
extern bool ClaimAbandoned(ClaimRequest *request, KeyRecord *record);
extern bool ClaimAbsent(const KeyName *name, KeyVersion *seen);

#endif /* IDEMPOTENCY_KEYS_CLAIM_H */
