/*-------------------------------------------------------------------------
 *
 * wakeup.h
 *	  How a waiter sleeps until the owner of a lease is done.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_WAKEUP_H
#define IDEMPOTENCY_WAKEUP_H

/* The waiter: prepare, look, sleep, look, sleep, ... and cancel. */
extern void WakeupPrepare(uint64 number);
extern void WakeupSleep(uint64 number, int round, long timeoutMs);
extern void WakeupSleepCounted(uint64 number, int round, long timeoutMs);
extern void WakeupCancel(void);

/* The owner, whose change of the key takes effect when he commits. */
extern void WakeupAfterCommit(uint64 number);
extern void WakeupAtCommit(void);
extern void WakeupAtAbort(void);

#endif /* IDEMPOTENCY_WAKEUP_H */
