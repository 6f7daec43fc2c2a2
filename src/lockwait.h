/*-------------------------------------------------------------------------
 *
 * lockwait.h
 *	  Heavyweight locks of our own, with an end to the wait for them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LOCKWAIT_H
#define IDEMPOTENCY_LOCKWAIT_H

#include "storage/lock.h"

extern bool LockWithin(const LOCKTAG *tag, LOCKMODE mode, int waitMs);
extern void LockGiveUp(const LOCKTAG *tag, LOCKMODE mode);

#endif /* IDEMPOTENCY_LOCKWAIT_H */
