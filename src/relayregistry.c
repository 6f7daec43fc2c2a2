/*-------------------------------------------------------------------------
 *
 * relayregistry.c
 *	  Which subscriptions have a handler, in all databases, and which of them
 *	  have something to do.
 *
 * It is in shared memory, and begins empty with the server.  A subscription
 * comes into it by the commit of subscribe(), or by the survey that the reaper
 * makes when it visits a database (relaysurvey.c): after a start, a restore or a
 * commit of two phases.  Each is in one of three states:
 *
 *	state		what it means						what ends it
 *	--------	---------------------------------	--------------------------------
 *	IDLE		nobody serves it; when it is due	the launcher chooses it, if it is
 *				and not put off, it is to be			due
 *	STARTING	a worker is being started for it	it attaches, or never comes
 *	SERVED		a worker has attached				it leaves
 *
 * It is due when somebody may have published, when a parked event is to be
 * given again, and when a worker has left it with more to do.  A worker that
 * serves it takes that back each time before it looks; so what comes while it
 * looks makes it due again.
 *
 * How a worker has left decides what follows:
 *
 *	IDLE		due when the bell rings, or at the time that it said
 *	GOES_ON		due at once
 *	BUSY		due, but put off for a moment
 *	DIED		due, but put off: each time in a row for twice as long
 *	UNFIT		likewise, and longer; its problem is kept for the survey
 *	GONE		forgotten
 *
 * Locks: the registry's own LWLock, in each function, exclusively where it
 * changes anything.  Nothing under it can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#include "relaybell.h"
#include "relayregistry.h"
#include "shmem.h"

typedef enum RelayState
{
	RELAY_STATE_IDLE,
	RELAY_STATE_STARTING,
	RELAY_STATE_SERVED
} RelayState;

/* How long a subscription is put off, at first and at most, in milliseconds. */
#define BUSY_MS 50
#define BUSY_MOST_MS 1000
#define DIED_MS 100
#define UNFIT_MS 1000
#define MOST_MS 30000

/* ----------------------------------------------------------------
 * Places
 * ----------------------------------------------------------------
 */

/*
 * Find returns a subscription of a database, or NULL; with database 0, a free
 * place.  All static functions need the lock.
 */
static RelaySubscription *
Find(Oid database, int64 number)
{
	RelayRegistry *registry = &Shared->relay;

	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database == database && it->number == number)
			return it;
	}
	return NULL;
}

/*
 * Take takes a place for a subscription.  Returns NULL if none is free.
 */
static RelaySubscription *
Take(Oid database, int64 number)
{
	RelayRegistry *registry = &Shared->relay;
	RelaySubscription *it = Find(InvalidOid, 0);

	if (it == NULL && registry->used < RELAY_SUBSCRIPTIONS)
		it = &registry->subscriptions[registry->used++];
	if (it == NULL || BellHang(database) < 0)
	{
		registry->full = true;
		return NULL;
	}
	it->database = database;
	it->number = number;
	return it;
}

static void
GiveBack(RelaySubscription *it)
{
	BellTakeDown(it->database);
	memset(it, 0, sizeof(RelaySubscription));
}

/*
 * Of returns the subscription of a task, or NULL if it was forgotten.
 */
static RelaySubscription *
Of(const RelayTask *task)
{
	RelaySubscription *it = &Shared->relay.subscriptions[task->place];

	return it->database == task->database && it->number == task->number ? it : NULL;
}

static void
WakeLauncher(void)
{
	Latch *launcher = Shared->relay.launcher;

	if (launcher != NULL)
		SetLatch(launcher);
}

static RelaySubscription *
Locked(const RelayTask *task)
{
	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	return Of(task);
}

static void
Unlock(void)
{
	LWLockRelease(Shared->relay.lock);
}

/*
 * Renew makes a subscription as one of which nothing is known, but that it may
 * have something to do.  Whoever serves it goes on.
 */
static void
Renew(RelaySubscription *it, Oid owner)
{
	it->owner = owner;
	it->due = true;
	it->notBefore = 0;
	it->failures = 0;
	it->told = false;
	it->problem[0] = '\0';
}

/* ----------------------------------------------------------------
 * Who comes and goes
 * ----------------------------------------------------------------
 */

/*
 * RegistryPut notes that a subscription was made or changed.
 */
void
RegistryPut(Oid database, int64 number, Oid owner)
{
	RelaySubscription *it;

	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it == NULL)
		it = Take(database, number);
	if (it != NULL)
	{
		it->notedAt = Shared->relay.clock;
		Renew(it, owner);
	}
	Unlock();
	WakeLauncher();
}

/*
 * RegistryRemove notes that a subscription is gone, or has no handler any more.
 * A worker that serves it finds out when it looks next.
 */
void
RegistryRemove(Oid database, int64 number)
{
	RelaySubscription *it;

	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it != NULL && it->state == RELAY_STATE_IDLE)
		GiveBack(it);
	Unlock();
}

/*
 * RegistryMarkDue notes that a subscription has something to do.
 */
void
RegistryMarkDue(Oid database, int64 number)
{
	RelaySubscription *it;

	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it != NULL)
		it->due = true;
	Unlock();
	WakeLauncher();
}

/*
 * RegistryBeginSurvey is called before the snapshot is made under which a
 * database is surveyed.  Returns what RegistryEndSurvey() wants.
 */
uint64
RegistryBeginSurvey(void)
{
	uint64 began;

	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	began = ++Shared->relay.clock;
	Unlock();
	return began;
}

/*
 * RegistryConfirm notes that the survey has found a subscription.  "due" says
 * that it may have something to do, "dueAt" when it will; 0 if never.
 */
void
RegistryConfirm(Oid database, int64 number, Oid owner, bool due, TimestampTz dueAt)
{
	RelaySubscription *it;

	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it == NULL)
	{
		it = Take(database, number);
		if (it != NULL)
			Renew(it, owner);
	}
	else if (it->owner != owner)
		Renew(it, owner);

	if (it != NULL)
	{
		it->notedAt = Shared->relay.clock;
		it->due |= due && it->state == RELAY_STATE_IDLE;
		if (dueAt != 0 && (it->dueAt == 0 || dueAt < it->dueAt))
			it->dueAt = dueAt;
	}
	Unlock();
	WakeLauncher();
}

/*
 * RegistryEndSurvey forgets the subscriptions of a database that the survey has
 * not found, and that nobody has made since it began.
 */
void
RegistryEndSurvey(Oid database, uint64 began)
{
	RelayRegistry *registry = &Shared->relay;

	LWLockAcquire(registry->lock, LW_EXCLUSIVE);
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database == database && it->notedAt < began && it->state == RELAY_STATE_IDLE)
			GiveBack(it);
	}
	Unlock();
}

/*
 * RegistryUntold finds a subscription of a database whose problem is to be
 * written down, and copies it.  Returns false if there is none.
 */
bool
RegistryUntold(Oid database, RelayTask *task, char *problem)
{
	RelayRegistry *registry = &Shared->relay;
	bool found = false;

	LWLockAcquire(registry->lock, LW_SHARED);
	for (int place = 0; place < registry->used && !found; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		found = it->database == database && !it->told && it->problem[0] != '\0';
		if (found)
		{
			*task = (RelayTask){place, it->database, it->owner, it->number};
			memcpy(problem, it->problem, RELAY_PROBLEM_BYTES);
		}
	}
	Unlock();
	return found;
}

/*
 * RegistryTold notes that the problem was written down.
 */
void
RegistryTold(const RelayTask *task)
{
	RelaySubscription *it = Locked(task);

	if (it != NULL)
		it->told = true;
	Unlock();
}

/*
 * RegistryDatabases returns the databases that have subscriptions here, each
 * once.
 */
List *
RegistryDatabases(void)
{
	List *databases = NIL;

	for (int place = 0; place < RELAY_DATABASES; place++)
	{
		Oid database = pg_atomic_read_u32(&Shared->relay.databases[place].oid);

		if (OidIsValid(database))
			databases = lappend_oid(databases, database);
	}
	return databases;
}

/*
 * RegistryForgetDatabase forgets all subscriptions of a database that is gone,
 * or has none any more.
 */
void
RegistryForgetDatabase(Oid database)
{
	RegistryEndSurvey(database, PG_UINT64_MAX);
}

/* ----------------------------------------------------------------
 * Who is served next
 * ----------------------------------------------------------------
 */

/*
 * NoteWhatIsDue makes due what the bells have rung for, and what was to be due
 * by now.
 */
static void
NoteWhatIsDue(TimestampTz now)
{
	RelayRegistry *registry = &Shared->relay;
	Oid rung[RELAY_DATABASES];
	int count = 0;

	for (int place = 0; place < RELAY_DATABASES; place++)
	{
		if (BellAnswer(place))
			rung[count++] = pg_atomic_read_u32(&registry->databases[place].oid);
	}
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		for (int i = 0; i < count && !it->due; i++)
			it->due = it->database == rung[i];
		if (it->dueAt != 0 && it->dueAt <= now)
		{
			it->due = true;
			it->dueAt = 0;
		}
	}
}

/*
 * IsPutOff tells whether a subscription is not to be served yet.  One for longer
 * than any is put off was so before somebody set the clock back.
 */
static bool
IsPutOff(const RelaySubscription *it, TimestampTz now)
{
	return it->notBefore > now && it->notBefore <= now + MOST_MS * INT64CONST(1000);
}

static bool
IsReady(const RelaySubscription *it, TimestampTz now)
{
	return OidIsValid(it->database) && it->state == RELAY_STATE_IDLE && it->due &&
		   !IsPutOff(it, now);
}

/*
 * ServedAt returns when a database was served last, and adds up in "workers"
 * how many workers are there now.
 */
static uint64
ServedAt(Oid database, int *workers)
{
	RelayRegistry *registry = &Shared->relay;
	uint64 servedAt = 0;

	*workers = 0;
	for (int place = 0; place < registry->used; place++)
	{
		const RelaySubscription *it = &registry->subscriptions[place];

		if (it->database != database)
			continue;
		servedAt = Max(servedAt, it->servedAt);
		*workers += it->state != RELAY_STATE_IDLE;
	}
	return servedAt;
}

/*
 * Best returns which of those that are ready comes next: of the database that
 * has the fewest workers, and was served longest ago, the subscription that was.
 * Adds up how many are ready, and how many are being served.
 */
static RelaySubscription *
Best(TimestampTz now, int *ready, int *working)
{
	RelayRegistry *registry = &Shared->relay;
	RelaySubscription *best = NULL;
	uint64 bestServedAt = 0;
	int bestWorkers = 0;

	*ready = *working = 0;
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];
		uint64 servedAt;
		int workers;

		*working += it->state != RELAY_STATE_IDLE;
		if (!IsReady(it, now))
			continue;
		(*ready)++;
		if (best != NULL && it->database == best->database)
		{
			if (it->servedAt < best->servedAt)
				best = it;
			continue;
		}
		servedAt = ServedAt(it->database, &workers);
		if (best == NULL || workers < bestWorkers ||
			(workers == bestWorkers && servedAt < bestServedAt))
		{
			best = it;
			bestServedAt = servedAt;
			bestWorkers = workers;
		}
	}
	return best;
}

/*
 * TakeUp notes that a subscription is being served from now on, or soon, and fills
 * "task".
 */
static void
TakeUp(RelaySubscription *it, RelayState state, RelayTask *task)
{
	RelayRegistry *registry = &Shared->relay;

	it->state = state;
	it->servedAt = ++registry->clock;
	*task = (RelayTask){it - registry->subscriptions, it->database, it->owner, it->number};
}

/*
 * RegistryChoose chooses the subscription that a worker is to be started for,
 * if there are fewer than "workers" at work.  Returns false if there is none.
 */
bool
RegistryChoose(int workers, RelayTask *task)
{
	RelayRegistry *registry = &Shared->relay;
	TimestampTz now = GetCurrentTimestamp();
	RelaySubscription *best;
	int ready;
	int working;

	LWLockAcquire(registry->lock, LW_EXCLUSIVE);
	NoteWhatIsDue(now);
	best = Best(now, &ready, &working);
	if (working >= workers)
		best = NULL;
	if (best != NULL)
	{
		best->state = RELAY_STATE_STARTING;
		best->servedAt = ++registry->clock;
		*task =
			(RelayTask){best - registry->subscriptions, best->database, best->owner, best->number};
		ready--;
		working++;
	}
	pg_atomic_write_u32(&registry->waiting, ready);
	pg_atomic_write_u32(&registry->working, working);
	Unlock();
	return best != NULL;
}

/*
 * RegistryNextTime returns when RegistryChoose() may choose something that it
 * would not now, though nobody calls; 0 if there is no such time.
 */
TimestampTz
RegistryNextTime(void)
{
	RelayRegistry *registry = &Shared->relay;
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz next = 0;

	LWLockAcquire(registry->lock, LW_SHARED);
	for (int place = 0; place < registry->used; place++)
	{
		const RelaySubscription *it = &registry->subscriptions[place];
		TimestampTz at = it->due ? it->notBefore : it->dueAt;

		if (it->state != RELAY_STATE_IDLE || at == 0 || (it->due && !IsPutOff(it, now)))
			continue;
		next = next == 0 ? at : Min(next, at);
	}
	Unlock();
	return next;
}

/*
 * RegistryRetryAll serves what was put off as soon as it is due.
 */
void
RegistryRetryAll(void)
{
	RelayRegistry *registry = &Shared->relay;

	LWLockAcquire(registry->lock, LW_EXCLUSIVE);
	for (int place = 0; place < registry->used; place++)
		registry->subscriptions[place].notBefore = 0;
	Unlock();
}

/*
 * RegistryTakeFull tells whether somebody has found no place since it was asked
 * last.
 */
bool
RegistryTakeFull(void)
{
	bool full;

	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
	full = Shared->relay.full;
	Shared->relay.full = false;
	Unlock();
	return full;
}

/*
 * RegistryOpen prepares for a new launcher: workers that its predecessor was
 * starting may never come.
 */
void
RegistryOpen(void)
{
	RelayRegistry *registry = &Shared->relay;

	LWLockAcquire(registry->lock, LW_EXCLUSIVE);
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->state == RELAY_STATE_STARTING)
		{
			it->state = RELAY_STATE_IDLE;
			it->due = true;
		}
	}
	Unlock();
}

/* ----------------------------------------------------------------
 * Whoever serves one
 * ----------------------------------------------------------------
 */

/*
 * RegistryAttach makes the caller the one who serves the subscription.  Returns
 * false if it is gone, or another does.
 */
bool
RegistryAttach(const RelayTask *task)
{
	RelaySubscription *it = Locked(task);
	bool free = it != NULL && it->state != RELAY_STATE_SERVED;

	if (free)
		it->state = RELAY_STATE_SERVED;
	Unlock();
	return free;
}

/*
 * RegistryBeginLook is called before the snapshot is made under which a worker
 * looks what there is to do.
 */
void
RegistryBeginLook(const RelayTask *task)
{
	RelaySubscription *it = Locked(task);

	if (it != NULL)
	{
		it->due = false;
		it->dueAt = 0;
	}
	Unlock();
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
 * RegistryUntouched returns the batch that a worker has left behind without
 * having called the handler, or 0.
 */
int64
RegistryUntouched(const RelayTask *task)
{
	RelaySubscription *it = Locked(task);
	int64 batch = it == NULL ? 0 : it->untouched;

	Unlock();
	return batch;
}

/*
 * RegistrySetUntouched notes such a batch; 0 for none.
 */
void
RegistrySetUntouched(const RelayTask *task, int64 batch)
{
	RelaySubscription *it = Locked(task);

	if (it != NULL)
		it->untouched = batch;
	Unlock();
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
	it = Locked(task);
	isNew = it != NULL && strcmp(it->problem, text) != 0;
	if (isNew)
	{
		memcpy(it->problem, text, RELAY_PROBLEM_BYTES);
		it->told = told;
	}
	Unlock();
	return isNew;
}

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
 * LeaveIt notes how a subscription was left.
 */
static void
LeaveIt(RelaySubscription *it, RelayEnd end, TimestampTz dueAt)
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
			PutOff(it, BUSY_MS, BUSY_MOST_MS);
			break;
		case RELAY_DIED:
			PutOff(it, DIED_MS, MOST_MS);
			break;
		case RELAY_UNFIT:
			PutOff(it, UNFIT_MS, MOST_MS);
			break;
		case RELAY_GONE:
			/* unless somebody has made it anew since we looked */
			if (!it->due)
				GiveBack(it);
			break;
	}
}

/*
 * RegistryLeave notes how a worker, or the launcher that could not send one, has
 * left the subscription; "dueAt" is when it is to be served again, though nobody
 * publish, or 0.
 */
void
RegistryLeave(const RelayTask *task, RelayEnd end, TimestampTz dueAt)
{
	RelaySubscription *it = Locked(task);

	if (it != NULL)
		LeaveIt(it, end, dueAt);
	Unlock();
	WakeLauncher();
}

/*
 * RegistryMoveOn does the same for a worker that would serve another one, as the
 * same role in the same database: if the next one that is to be served is such, and
 * there are not more than "workers".  Returns whether it has attached to "next".
 */
bool
RegistryMoveOn(const RelayTask *task, RelayEnd end, TimestampTz dueAt, int workers, RelayTask *next)
{
	RelaySubscription *it = Locked(task);
	TimestampTz now = GetCurrentTimestamp();
	RelaySubscription *best;
	int ready;
	int working;

	if (it != NULL)
		LeaveIt(it, end, dueAt);
	NoteWhatIsDue(now);
	best = Best(now, &ready, &working);
	if (best != NULL &&
		(best->database != task->database || best->owner != task->owner || working >= workers))
		best = NULL;
	if (best != NULL)
	{
		TakeUp(best, RELAY_STATE_SERVED, next);
		ready--;
		working++;
	}
	pg_atomic_write_u32(&Shared->relay.waiting, ready);
	pg_atomic_write_u32(&Shared->relay.working, working);
	Unlock();
	WakeLauncher();
	return best != NULL;
}

/*
 * RegistryNeverCame notes that a worker has ended; if it had not attached, its
 * subscription is left as by one that died.
 */
void
RegistryNeverCame(const RelayTask *task)
{
	RelaySubscription *it = Locked(task);
	bool never = it != NULL && it->state == RELAY_STATE_STARTING;

	Unlock();
	if (never)
		RegistryLeave(task, RELAY_DIED, 0);
}

/*
 * RegistryInit makes the registry, when shared memory is made: it is empty.
 */
void
RegistryInit(RelayRegistry *registry)
{
	pg_atomic_init_u32(&registry->generation, 0);
	pg_atomic_init_u32(&registry->waiting, 0);
	pg_atomic_init_u32(&registry->working, 0);
	for (int place = 0; place < RELAY_DATABASES; place++)
	{
		pg_atomic_init_u32(&registry->databases[place].oid, InvalidOid);
		pg_atomic_init_u32(&registry->databases[place].bell, 0);
	}
}
