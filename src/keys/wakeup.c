/*-------------------------------------------------------------------------
 *
 * keys/wakeup.c
 *	  Waking sessions that wait for the lease of another session.
 *
 * The row of a lease is committed, so its owner holds no lock to wait for.  A waiter
 * sleeps on a condition variable in shared memory, which a transaction that changes the
 * row broadcasts after its commit:
 *
 *		waiter					owner
 *		WakeupPrepare			complete(): WakeupAfterCommit
 *		probe: leased			COMMIT, the change is visible
 *		WakeupSleep				WakeupAtCommit: broadcast
 *		probe: stored
 *		WakeupCancel
 *
 * The waiter prepares before it probes, so that it misses no broadcast after its probe.
 * Keys share WAKEUP_VARIABLES variables, so a waiter probes again after each wakeup.  A
 * sleep takes a second at most, because COMMIT PREPARED (which runs in another backend),
 * the end of a lease and a crash broadcast nothing.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "port/pg_bitutils.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

#include "base/compat.h"
#include "keys/wakeup.h"
#include "server/shmem.h"
#include "server/stats.h"

/* How many condition variables the waiters share: the bits of "pending". */
#define WAKEUP_VARIABLES 64

/* NULL unless the library is preloaded. */
static ConditionVariable *variables = NULL;

/* The shortest and the longest sleep, in milliseconds. */
#define FIRST_SLEEP 10
#define LONGEST_SLEEP 1000

/* After this many rounds, doubling the first sleep exceeds the longest. */
#define LONG_ROUNDS 7

/*
 * The variables to broadcast at commit, one bit each, so that nothing can fail after the
 * commit.
 */
static uint64 pending = 0;

StaticAssertDecl(FIRST_SLEEP << LONG_ROUNDS >= LONGEST_SLEEP, "LONG_ROUNDS is too small");

static int
VariableNumber(uint64 number)
{
	return (int) (number % WAKEUP_VARIABLES);
}

/*
 * WakeupPrepare makes sure that no later broadcast for the key is missed.  The caller
 * probes next, and ends the wait with WakeupCancel(); an error that ends the
 * (sub)transaction does that as well.
 */
void
WakeupPrepare(uint64 number)
{
	if (variables != NULL)
		ConditionVariablePrepareToSleep(&variables[VariableNumber(number)]);
}

/*
 * WakeupSleep sleeps until the key is broadcast or the timeout has passed, for a second
 * at most; "round" counts the sleeps of one wait from 0.  It can return early.  Throws
 * what an interrupt does: cancel, statement_timeout, termination.
 */
static void
WakeupSleep(uint64 number, int round, long timeoutMs)
{
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("IdempotencyLease");
	timeoutMs = Max(0, Min(timeoutMs, LONGEST_SLEEP));
	if (variables != NULL)
	{
		/*
		 * The server checks for a broadcast only when the latch is set, and another
		 * wait since WakeupPrepare() can have reset it.
		 */
		SetLatch(MyLatch);
		(void) ConditionVariableTimedSleep(&variables[VariableNumber(number)], timeoutMs, event);
		return;
	}

	/* Without shared memory, sleep longer in each round */
	timeoutMs = Min(timeoutMs, FIRST_SLEEP << Min(round, LONG_ROUNDS));
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, timeoutMs, event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * WakeupSleepCounted sleeps as WakeupSleep() does, and counts the wait and its time,
 * however the sleep ends.
 */
void
WakeupSleepCounted(uint64 number, int round, long timeoutMs)
{
	instr_time began;

	if (round == 0)
		Count(COUNT_WAITS);
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
 * WakeupCancel ends the wait, if one was prepared.
 */
void
WakeupCancel(void)
{
	ConditionVariableCancelSleep();
}

/*
 * WakeupAfterCommit requests a broadcast for the key when this transaction commits.  A
 * rollback to a savepoint does not undo the request: a superfluous wakeup is harmless.
 */
void
WakeupAfterCommit(uint64 number)
{
	if (variables != NULL)
		pending |= UINT64CONST(1) << VariableNumber(number);
}

/*
 * WakeupAtCommit does the requested broadcasts, for XACT_EVENT_COMMIT.  It cannot fail.  A
 * test may wait at its injection point, since no LWLock is held and interrupts are held
 * off, but an error injected there would stop the server.
 *
 * The server calls these callbacks after the transaction has ended for others
 * (ProcArrayEndTransaction), so that a waiter that probes now sees what it wrote, and
 * before it releases the locks.  A waiter that takes over a lease can thus wait for the
 * key's lock for a moment; one that replays an outcome needs no lock.
 */
void
WakeupAtCommit(void)
{
	if (pending == 0)
		return;

	InjectionPoint("commit-wake");
	for (; pending != 0; pending &= pending - 1)
		ConditionVariableBroadcast(&variables[pg_rightmost_one_pos64(pending)]);
}

/*
 * WakeupAtAbort drops the requests; for XACT_EVENT_ABORT, and for XACT_EVENT_PREPARE,
 * since COMMIT PREPARED runs in another backend.
 */
void
WakeupAtAbort(void)
{
	pending = 0;
}

static void
InitializeVariables(void *memory, LWLock *lock)
{
	ConditionVariable *made = memory;

	for (int i = 0; i < WAKEUP_VARIABLES; i++)
		ConditionVariableInit(&made[i]);
}

/*
 * WakeupInit registers the condition variables; called from _PG_init().
 */
void
WakeupInit(void)
{
	SharedMemoryRegister(&(SharedPart){
		(void **) &variables, WAKEUP_VARIABLES * sizeof(ConditionVariable), InitializeVariables});
}
