/*-------------------------------------------------------------------------
 *
 * wakeup.c
 *	  How a waiter sleeps until the owner of a lease is done.
 *
 * The owner of a lease holds no lock that others could wait for: his row is
 * committed.  A waiter sleeps on a condition variable in shared memory, which
 * whoever changes the row broadcasts after his commit:
 *
 *		waiter					owner
 *		WakeupPrepare			complete(): WakeupAfterCommit
 *		look: still leased		COMMIT, the change is visible
 *		WakeupSleep				WakeupAtCommit: broadcast
 *		look: done
 *		WakeupCancel
 *
 * Since the waiter prepares before he looks, a broadcast that comes after his
 * look ends his sleep.  All keys share WAKEUP_VARIABLES variables by their
 * hash, so that a sleep may end for another key, or for nothing: whoever sleeps
 * looks again, under a new snapshot.
 *
 * No broadcast is ever to be relied upon: COMMIT PREPARED makes none (it runs
 * in a backend that knows nothing of the transaction), nor does a lease that
 * just ends, nor a server that crashes.  So a sleep ends after a second at the
 * latest.  Without shared memory there are no broadcasts at all, and sleeps
 * begin short and grow to that second.  On a hot standby nobody claims, hence
 * nobody waits.
 *
 * Locks: none that outlives a call; the spinlocks of the condition variables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "port/pg_bitutils.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"

#include "compat.h"
#include "shmem.h"
#include "stats.h"
#include "wakeup.h"

/* The shortest and the longest sleep, in milliseconds. */
#define FIRST_SLEEP 10
#define LONGEST_SLEEP 1000

/* From this round on, doubling the first sleep exceeds the longest. */
#define LONG_ROUNDS 7

/*
 * The variables that this transaction broadcasts if it commits, one bit each.
 * A fixed map, so that nothing can fail when it is read after the commit.
 */
#define BITS_PER_WORD 64
#define NOTED_WORDS (WAKEUP_VARIABLES / BITS_PER_WORD)
static uint64 noted[NOTED_WORDS];
static bool anyNoted = false;

StaticAssertDecl((WAKEUP_VARIABLES & (WAKEUP_VARIABLES - 1)) == 0,
				 "WAKEUP_VARIABLES must be a power of two");
StaticAssertDecl(FIRST_SLEEP << LONG_ROUNDS >= LONGEST_SLEEP, "LONG_ROUNDS is too small");

static int
VariableNumber(uint64 number)
{
	return (int) (number & (WAKEUP_VARIABLES - 1));
}

/* ----------------------------------------------------------------
 * The waiter
 * ----------------------------------------------------------------
 */

/*
 * SleepEvent returns what pg_stat_activity shows of a sleep: "Extension" and,
 * from 17 on, a name of its own.
 */
static uint32
SleepEvent(void)
{
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("IdempotencyLease");
	return event;
}

/*
 * WakeupPrepare makes sure that no broadcast for the key is missed from now
 * on.  The caller then looks whether he has to wait at all.  To be ended by
 * WakeupCancel(); an error that ends the (sub)transaction does that as well.
 */
void
WakeupPrepare(uint64 number)
{
	if (Shared != NULL)
		ConditionVariablePrepareToSleep(&Shared->wakeup[VariableNumber(number)]);
}

/*
 * SleepOnLatch sleeps on nothing but the process's latch, round by round for
 * longer.
 */
static void
SleepOnLatch(int round, long timeoutMs)
{
	long ms = FIRST_SLEEP << Min(round, LONG_ROUNDS);

	ms = Min(ms, timeoutMs);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, ms, SleepEvent());
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * SleepOnVariable sleeps on the key's condition variable.
 */
static void
SleepOnVariable(uint64 number, long timeoutMs)
{
	/*
	 * The server looks whether we were broadcast only when the latch is set,
	 * and whatever else the caller waited for since he prepared may have reset
	 * it.  So we set it: the first look is then at once.
	 */
	SetLatch(MyLatch);
	(void) ConditionVariableTimedSleep(&Shared->wakeup[VariableNumber(number)], timeoutMs,
									   SleepEvent());
}

/*
 * WakeupSleep sleeps until the key is broadcast or the timeout is over, and a
 * second at most; "round" counts the sleeps of one wait from 0 on.  It may also
 * return early, for no reason.  Throws what an interrupt does: cancel,
 * statement_timeout, termination.
 */
void
WakeupSleep(uint64 number, int round, long timeoutMs)
{
	timeoutMs = Max(0, Min(timeoutMs, LONGEST_SLEEP));
	if (Shared != NULL)
		SleepOnVariable(number, timeoutMs);
	else
		SleepOnLatch(round, timeoutMs);
}

/*
 * WakeupSleepCounted sleeps for the owner of a key: the wait and its time are
 * counted, however the sleep ends.
 */
void
WakeupSleepCounted(uint64 number, int round, long timeoutMs)
{
	instr_time began;

	if (round == 0)
		CountEvent(COUNT_WAITS);
	INSTR_TIME_SET_CURRENT(began);
	PG_TRY();
	{
		WakeupSleep(number, round, timeoutMs);
	}
	PG_FINALLY();
	{
		CountWaitTime(began);
	}
	PG_END_TRY();
}

/*
 * WakeupCancel ends the wait.  Does nothing if none was prepared.
 */
void
WakeupCancel(void)
{
	ConditionVariableCancelSleep();
}

/* ----------------------------------------------------------------
 * The owner
 * ----------------------------------------------------------------
 */

/*
 * WakeupAfterCommit notes that the waiters of the key are to be woken when this
 * transaction commits.  A rollback to a savepoint does not undo the note: to be
 * woken in vain does no harm.
 */
void
WakeupAfterCommit(uint64 number)
{
	int variable = VariableNumber(number);

	if (Shared == NULL)
		return;
	noted[variable / BITS_PER_WORD] |= UINT64CONST(1) << (variable % BITS_PER_WORD);
	anyNoted = true;
}

/*
 * WakeupAtCommit broadcasts what was noted, and forgets it; for
 * XACT_EVENT_COMMIT.  It cannot fail; a test may wait at a point of it, as at one
 * of RelayAtCommit(), since no LWLock is held and interrupts are put off, but an
 * error that is injected there would take the server down.
 *
 * The server calls these callbacks when the transaction has left the list of
 * running ones (ProcArrayEndTransaction), so that a waiter who looks now sees
 * what it wrote; and before it releases the locks, the key's among them.  A
 * waiter who finds a lease to take over may thus have to wait for the lock for
 * a moment; one who finds an outcome to replay needs no lock.
 */
void
WakeupAtCommit(void)
{
	if (!anyNoted)
		return;

	InjectionPoint("commit-wake");
	for (int word = 0; word < NOTED_WORDS; word++)
	{
		uint64 bits = noted[word];

		while (bits != 0)
		{
			int bit = pg_rightmost_one_pos64(bits);

			ConditionVariableBroadcast(&Shared->wakeup[word * BITS_PER_WORD + bit]);
			bits &= bits - 1;
		}
	}
	WakeupAtAbort();
}

/*
 * WakeupAtAbort forgets what was noted; for XACT_EVENT_ABORT, and for
 * XACT_EVENT_PREPARE, since COMMIT PREPARED knows nothing of it.
 */
void
WakeupAtAbort(void)
{
	if (!anyNoted)
		return;
	memset(noted, 0, sizeof(noted));
	anyNoted = false;
}
