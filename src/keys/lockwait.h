/*-------------------------------------------------------------------------
 *
 * keys/lockwait.h
 *	  Waiting for a heavyweight lock for a limited time.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_LOCKWAIT_H
#define IDEMPOTENCY_KEYS_LOCKWAIT_H

#include "storage/lock.h"

extern bool LockWithin(const LOCKTAG *tag, LOCKMODE mode, int waitMs);
extern void LockReleaseEarly(const LOCKTAG *tag, LOCKMODE mode);

#endif /* IDEMPOTENCY_KEYS_LOCKWAIT_H */
