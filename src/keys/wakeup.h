/*-------------------------------------------------------------------------
 *
 * keys/wakeup.h
 *	  Waking sessions that wait for the lease of another session.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_WAKEUP_H
#define IDEMPOTENCY_KEYS_WAKEUP_H

/* The waiter: prepare, probe, sleep, probe, sleep, ... and cancel. */
extern void WakeupPrepare(uint64 number);
extern void WakeupSleepCounted(uint64 number, int round, long timeoutMs);
extern void WakeupCancel(void);

/* The owner. */
extern void WakeupAfterCommit(uint64 number);
extern void WakeupAtCommit(void);
extern void WakeupAtAbort(void);

/* For _PG_init(). */
extern void WakeupInit(void);

#endif /* IDEMPOTENCY_KEYS_WAKEUP_H */
