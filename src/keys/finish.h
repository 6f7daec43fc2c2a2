/*-------------------------------------------------------------------------
 *
 * keys/finish.h
 *	  The end of a claimed operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_FINISH_H
#define IDEMPOTENCY_KEYS_FINISH_H

#include "keys/lease.h"

extern void ClaimFinish(const KeyName *name, const Ownership *own, StoredOutcome *outcome);

#endif /* IDEMPOTENCY_KEYS_FINISH_H */
