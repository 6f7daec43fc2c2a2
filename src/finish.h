/*-------------------------------------------------------------------------
 *
 * finish.h
 *	  The end of a claimed operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_FINISH_H
#define IDEMPOTENCY_FINISH_H

#include "lease.h"

extern void ClaimFinish(const KeyName *name, const Ownership *own, StoredOutcome *outcome);

#endif /* IDEMPOTENCY_FINISH_H */
