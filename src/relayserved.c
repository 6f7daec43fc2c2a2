/*-------------------------------------------------------------------------
 *
 * relayserved.c
 *	  The subscriptions of the registry that are being served, and how they are
 *	  left.
 *
 * A worker attaches to a subscription, says when it looks, and leaves.  How it has
 * left decides what follows:
 *
 *	IDLE		due when the bell rings, or at the time that it said
 *	GOES_ON		due at once
 *	BUSY		due, but put off: each time in a row for twice as long.  A commit that lets
 *				the subscription go says so, unless it is one of two phases
 *	DIED		due, but put off: each time in a row for twice as long
 *	UNFIT		likewise, and longer; its problem is kept for the survey
 *	GONE		forgotten
 *
 * A worker whose handler keeps a session waiting that is to drop or copy the database
 * is ended.  It leaves as BUSY, and gives its batch back.
 *
 * A batch that it has left behind without having called the handler is remembered, so
 * that no event of it is suspected of the worker's end.
 *
 * Locks: the registry's, in each function.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#include "relaybell.h"
#include "relayregistryinternal.h"

/* How long a subscription is put off, at first and at most, in milliseconds. */
#define BUSY_MS 50
#define BUSY_MOST_MS 10000
#define NOT_SENT_MOST_MS 1000
#define DIED_MS 100
#define UNFIT_MS 1000

/* ----------------------------------------------------------------
 * Whoever serves it
 * ----------------------------------------------------------------
 */

static void
Attach(RelaySubscription *it)
{
	it->state = RELAY_STATE_SERVED;
	it->pid = 0;
	it->closing = 0;
	it->recalled = false;
}

/*
 * RegistryMayRecall lets the launcher end the caller if it keeps a session waiting for the
 * database: it is connected, and can take that.
 */
void
RegistryMayRecall(const RelayTask *task)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL && it->state == RELAY_STATE_SERVED)
		it->pid = MyProcPid;
	RegistryUnlock();
}

/*
 * RegistryAttach makes the caller the one who serves the subscription.  Returns
 * false if it is gone, or another does.
 */
bool
RegistryAttach(const RelayTask *task)
{
	RelaySubscription *it = RegistryLockTask(task);
	bool free = it != NULL && it->state != RELAY_STATE_SERVED;

	if (free)
		Attach(it);
	RegistryUnlock();
	return free;
}

/*
 * RegistryBeginLook is called before the snapshot is made under which a worker
 * looks what there is to do.  If that is its "last" look, it arms the bells of what the
 * subscription wants.
 */
void
RegistryBeginLook(const RelayTask *task, bool last)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL)
	{
		it->due = false;
		it->dueAt = 0;
		if (last)
			BellArm(it->database, &it->wants);
	}
	RegistryUnlock();
}

/*
 * RegistryServedDatabases returns the databases in which workers are, each once.
 */
List *
RegistryServedDatabases(void)
{
	RelayRegistry *registry = &Shared->relay;
	Oid *served = palloc(registry->size * sizeof(Oid)); /* nothing under the lock can fail */
	List *databases = NIL;
	int count = 0;

	LWLockAcquire(registry->lock, LW_SHARED);
	for (int place = 0; place < registry->used; place++)
	{
		const RelaySubscription *it = &registry->subscriptions[place];
		int i = 0;

		if (it->state != RELAY_STATE_SERVED)
			continue;
		while (i < count && served[i] != it->database)
			i++;
		if (i == count)
			served[count++] = it->database;
	}
	RegistryUnlock();
	for (int i = 0; i < count; i++)
		databases = lappend_oid(databases, served[i]);
	pfree(served);
	return databases;
}

/*
 * RegistryNoteClosing notes whether a session waits to drop or copy a database, and ends
 * the workers there if it has been so before: they do not leave by themselves.
 */
void
RegistryNoteClosing(Oid database, bool closing)
{
	RelayRegistry *registry = &Shared->relay;

	RegistryLock();
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database != database || it->state != RELAY_STATE_SERVED)
			continue;
		it->closing = closing ? it->closing + 1 : 0;
		if (it->closing > 1 && it->pid != 0)
		{
			it->recalled = true;
			kill(it->pid, SIGTERM);
		}
	}
	RegistryUnlock();
}

/*
 * RegistryIsRecalled tells whether the worker was ended for that.
 */
bool
RegistryIsRecalled(const RelayTask *task)
{
	RelaySubscription *it = RegistryLockTask(task);
	bool recalled = it != NULL && it->recalled;

	RegistryUnlock();
	return recalled;
}

/*
 * RegistryOthersWait tells whether a worker is wanted elsewhere, or there are
 * more than may be.
 */
bool
RegistryOthersWait(int workers)
{
	return pg_atomic_read_u32(&Shared->relay.waiting) > 0 ||
		   pg_atomic_read_u32(&Shared->relay.working) > (uint32) workers;
}

/*
 * RegistryIsUntouched tells whether no handler has seen the batch that a worker, or a
 * consumer, has left behind.
 */
bool
RegistryIsUntouched(const RelayTask *task, int64 batch)
{
	RelaySubscription *it = RegistryLockTask(task);
	bool untouched = it != NULL && (it->untouched == batch || it->untouched == UNTOUCHED_ANY);

	RegistryUnlock();
	return untouched;
}

/*
 * RegistrySetUntouched notes such a batch; 0 for none.
 */
void
RegistrySetUntouched(const RelayTask *task, int64 batch)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL)
		it->untouched = batch;
	RegistryUnlock();
}

/*
 * RegistryNoteProblem notes why a subscription cannot be served; "told" says
 * that its last_error tells that already.  Returns whether it is a new problem,
 * which the log has not got yet.
 */
bool
RegistryNoteProblem(const RelayTask *task, const char *problem, bool told)
{
	char text[RELAY_PROBLEM_BYTES] = {0};
	RelaySubscription *it;
	bool isNew;

	memcpy(text, problem, pg_mbcliplen(problem, strlen(problem), RELAY_PROBLEM_BYTES - 1));
	it = RegistryLockTask(task);
	isNew = it != NULL && strcmp(it->problem, text) != 0;
	if (isNew)
	{
		memcpy(it->problem, text, RELAY_PROBLEM_BYTES);
		it->told = told;
	}
	RegistryUnlock();
	return isNew;
}

/* ----------------------------------------------------------------
 * How it is left
 * ----------------------------------------------------------------
 */

/*
 * PutOff puts a subscription off, each time in a row for twice as long.
 */
static void
PutOff(RelaySubscription *it, int64 ms, int64 most)
{
	ms = Min(ms << Min(it->failures, 16), most);
	it->failures++;
	it->due = true;
	it->notBefore = GetCurrentTimestamp() + ms * 1000;
}

/*
 * Succeed forgets what was wrong.
 */
static void
Succeed(RelaySubscription *it)
{
	it->failures = 0;
	it->notBefore = 0;
	it->problem[0] = '\0';
	it->told = false;
}

/*
 * RegistryProgress notes that events were handled: whatever was wrong before is over, and
 * what goes wrong from now on begins anew.
 */
void
RegistryProgress(const RelayTask *task)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL)
		Succeed(it);
	RegistryUnlock();
}

/*
 * LeaveIt notes how a subscription was left.  "busyMost" is for how long it is put off at
 * most if somebody else is at it.
 */
static void
LeaveIt(RelaySubscription *it, RelayEnd end, TimestampTz dueAt, int64 busyMost)
{
	it->state = RELAY_STATE_IDLE;
	switch (end)
	{
		case RELAY_IDLE:
			Succeed(it);
			it->dueAt = dueAt;
			break;
		case RELAY_GOES_ON:
			Succeed(it);
			it->due = true;
			break;
		case RELAY_BUSY:
			PutOff(it, BUSY_MS, busyMost);
			break;
		case RELAY_DIED:
			PutOff(it, DIED_MS, PUT_OFF_MOST_MS);
			break;
		case RELAY_UNFIT:
			PutOff(it, UNFIT_MS, PUT_OFF_MOST_MS);
			break;
		case RELAY_GONE:
			/* unless somebody has made it anew since we looked */
			if (!it->due)
				RegistryGiveUp(it);
			break;
	}
}

/*
 * RegistryLeave notes how a worker has left the subscription; "dueAt" is when it is
 * to be served again, though nobody publish, or 0.
 */
void
RegistryLeave(const RelayTask *task, RelayEnd end, TimestampTz dueAt)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL)
		LeaveIt(it, end, dueAt, BUSY_MOST_MS);
	RegistryUnlock();
	RegistryWakeLauncher();
}

/*
 * RegistryMoveOn does the same for a worker that would serve another one, as the
 * same role in the same database: if the next one that is to be served is such, and
 * there are not more than "workers".  Returns whether it has attached to "next".
 */
bool
RegistryMoveOn(const RelayTask *task, RelayEnd end, TimestampTz dueAt, int workers, RelayTask *next)
{
	RelaySubscription *it = RegistryLockTask(task);
	bool found;

	if (it != NULL)
		LeaveIt(it, end, dueAt, BUSY_MOST_MS);
	found = RegistryTakeNext(workers, RELAY_STATE_SERVED, task, next);
	if (found)
	{
		Attach(&Shared->relay.subscriptions[next->place]);
		Shared->relay.subscriptions[next->place].pid = MyProcPid;
	}
	RegistryUnlock();
	RegistryWakeLauncher();
	return found;
}

/*
 * RegistryNotSent notes that no worker comes that the launcher has chosen the
 * subscription for.  It changes nothing if one has come nevertheless.
 */
void
RegistryNotSent(const RelayTask *task, RelayEnd end)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL && it->state == RELAY_STATE_STARTING)
		LeaveIt(it, end, 0, NOT_SENT_MOST_MS);
	RegistryUnlock();
}
