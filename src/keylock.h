/*-------------------------------------------------------------------------
 *
 * keylock.h
 *	  The lock that orders the waiters for one key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYLOCK_H
#define IDEMPOTENCY_KEYLOCK_H

#include "keyname.h"

extern uint64 KeyLockNumber(const KeyName *name);
extern bool KeyLockAcquire(const KeyName *name, int waitMs);
extern void KeyLockRelease(const KeyName *name);

#endif /* IDEMPOTENCY_KEYLOCK_H */
