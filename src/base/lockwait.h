/*-------------------------------------------------------------------------
 *
 * base/lockwait.h
 *	  Waiting for a heavyweight lock for a limited time.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_LOCKWAIT_H
#define IDEMPOTENCY_BASE_LOCKWAIT_H

#include "storage/lock.h"

extern bool LockWithin(const LOCKTAG *tag, LOCKMODE mode, int waitMs);
extern void LockReleaseEarly(const LOCKTAG *tag, LOCKMODE mode);

#endif /* IDEMPOTENCY_BASE_LOCKWAIT_H */
