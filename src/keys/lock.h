/*-------------------------------------------------------------------------
 *
 * keys/lock.h
 *	  The lock of a key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_LOCK_H
#define IDEMPOTENCY_KEYS_LOCK_H

#include "base/compat.h"
#include "base/name.h"

extern uint64 KeyLockNumber(const KeyName *name);
extern bool KeyLockAcquire(const KeyName *name, int waitMs);
extern void KeyLockRelease(const KeyName *name);
pg_noreturn extern void KeyLockRefused(const KeyName *name);

#endif /* IDEMPOTENCY_KEYS_LOCK_H */
