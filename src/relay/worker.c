/*-------------------------------------------------------------------------
 *
 * relay/worker.c
 *	  The worker that calls the handler of a subscription with its events.
 *
 * It connects as the owner of the subscription and repeats: fetch a batch, COMMIT; call the
 * handler with each event, acknowledge, COMMIT.  The batch has no lease: it is out as long as
 * this worker lives and says that it has it (RelayHold()).  After SIGTERM the worker gives
 * it back; if the worker dies, the next fetch() takes it over and counts a failure.
 *
 * A transaction has the effects of some events and their acknowledgement: those of a batch,
 * or of COMMIT_MS.  The first event that fails ends the batch: those before it are acknowledged,
 * those behind it go back, and the next fetch() returns what is left of them.  If a transaction
 * fails as a whole, its events are handled again one by one, so that the error belongs to one of
 * them.
 *
 * Locks: those of fetch() and ack(), to the end of each transaction; ACCESS SHARE on the
 * tables of delivery, and ROW EXCLUSIVE on the database, not waited for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "catalog/pg_type.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "base/compat.h"
#include "base/errors.h"
#include "keys/transaction.h"
#include "query/query.h"
#include "query/relation.h"
#include "relay/relay.h"
#include "settings/guc.h"
#include "settings/timing.h"

/* How many events a batch has at most. */
#define BATCH_EVENTS 100

/* How long a worker remains: without events, and while others wait. */
#define LINGER_MS 250
#define SLICE_MS 1000

/* After how long a transaction commits what it has handled of its batch. */
#define COMMIT_MS 250

/* How many dead letters the log gets from a worker in a minute. */
#define LOGGED_MOST 10
#define LOGGED_MS 60000

/* For how long a worker that ends tries to give its batch back. */
#define GIVE_BACK_MS 500

/* The subscription, and whether a batch is out. */
static ExtensionQuery findQuery = {
	.table = "subscription",
	.text = "SELECT s.owner, s.handler, s.topics, (SELECT pg_catalog.max(a.modulus)"
			" FROM idempotency.partition AS a WHERE a.subscription" EQ "s.subscription),"
			" EXISTS (SELECT FROM idempotency.position AS n"
			" WHERE n.subscription" EQ "s.subscription AND n.batch" EQ "$2)"
			" FROM idempotency.subscription AS s"
			" WHERE s.subscription" EQ "$1 AND s.handler IS NOT NULL",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
	.results = {NAMEOID, TEXTOID, TEXTARRAYOID, INT4OID, BOOLOID},
};
static ExtensionQuery fetchQuery = {
	.table = "subscription",
	.text = "SELECT f.batch, f.seq, f.id, f"
			" FROM idempotency.fetch($1, $2, wait => $3) AS f",
	.parameters = 3,
	.types = {TEXTOID, INT4OID, INTERVALOID},
	.results = {INT8OID, INT8OID, UUIDOID},
	.checksCaller = true,
};
static ExtensionQuery dueQuery = {
	.table = "subscription",
	.text = "SELECT idempotency.has_more($1), idempotency_internal.next_due($1)",
	.parameters = 1,
	.types = {TEXTOID},
	.results = {BOOLOID, TIMESTAMPTZOID},
	.checksCaller = true,
};
static ExtensionQuery ackQuery = {
	.table = "subscription",
	.text = "SELECT idempotency.ack($1, $2, $3)",
	.parameters = 3,
	.types = {TEXTOID, INT8OID, INT8ARRAYOID},
	.results = {INT8OID},
	.checksCaller = true,
};
static ExtensionQuery ackAllQuery = {
	.table = "subscription",
	.text = "SELECT idempotency.ack($1, $2)",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
	.results = {INT8OID},
	.checksCaller = true,
};
static ExtensionQuery nackQuery = {
	.table = "subscription",
	.text = "SELECT idempotency.nack($1, $2, $3, $4, dead => $5)",
	.parameters = 5,
	.types = {TEXTOID, INT8OID, UUIDOID, TEXTOID, BOOLOID},
	.results = {TIMESTAMPTZOID},
	.checksCaller = true,
};
static ExtensionQuery giveBackQuery = {
	.table = "subscription",
	.text = "SELECT idempotency.nack(n.subscription, n.batch, NULL) FROM idempotency.position AS n"
			" WHERE n.subscription" EQ "$1 AND n.batch" EQ "$2 AND EXISTS (SELECT"
			" FROM idempotency.partition AS a WHERE a.subscription" EQ "n.subscription"
			" AND a.partition" EQ "n.partition FOR UPDATE SKIP LOCKED)",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
	.results = {TIMESTAMPTZOID},
	.checksCaller = true,
};

static const char *const tables[] = {"subscription", "partition",  "position", "parked",
									 "outbox",		 "outbox_seq", "key",	   "token"};

typedef struct BatchEvent
{
	int64 seq;
	pg_uuid_t id;
	Datum event;
} BatchEvent;

/* The batch that this worker has; in batchContext. */
typedef struct WorkerBatch
{
	int64 number; /* 0: none */
	BatchEvent *events;
	int count;
	int next;	 /* the first event that no transaction has finished */
	int single;	 /* events before this one are handled in a transaction each */
	char *error; /* with which the event "next" has failed in a transaction of its own */
	int sqlstate;
} WorkerBatch;

static RelayJob job;
static char name[RELAY_NAME_BYTES];
static bool hadBatch = false;
static WorkerBatch batch;
static MemoryContext batchContext;
static MemoryContext stepContext;
static instr_time began;
static int unlogged = 0; /* dead letters that the log does not have */

/* For RelayLeave(), if the worker exits now. */
static RelayEnd leaving = RELAY_DIED;
static TimestampTz nextDue = 0;

/* After a fetch without events: whether another one can return some. */
static bool hasMore = false;

static volatile sig_atomic_t terminated = false; /* by SIGTERM */

/* ----------------------------------------------------------------
 * Transactions
 * ----------------------------------------------------------------
 */

/*
 * SetLocally sets a setting until the end of the transaction.
 */
static void
SetLocally(const char *setting, const char *value)
{
	(void) set_config_option(setting, value, PGC_USERSET, PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0,
							 false);
}

static void
Begin(void)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	MemoryContextSwitchTo(stepContext);
	PushActiveSnapshot(GetTransactionSnapshot());
}

static void
Commit(void)
{
	PopActiveSnapshot();
	InjectionPoint("relay-commit");
	CommitTransactionCommand();
	MemoryContextSwitchTo(stepContext);
}

typedef bool Step(void *argument);

/*
 * Run runs a step in a transaction.  No code that runs in it, its commit included, can change the
 * role.  The step returns whether to commit.  Returns NULL if it has; an error with code 0 if the
 * step has refused to; otherwise the error, in stepContext.
 */
static ErrorData *
Run(Step *step, void *argument)
{
	static ErrorData refused;
	ErrorData *volatile error = NULL;
	Oid user;
	int context;

	PG_TRY();
	{
		Begin();
		GetUserIdAndSecContext(&user, &context);
		SetUserIdAndSecContext(user, context | SECURITY_LOCAL_USERID_CHANGE);
		if (step(argument))
		{
			Commit();
			SetUserIdAndSecContext(user, context);
		}
		else
		{
			error = &refused;
			AbortOutOfAnyTransaction();
		}
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(stepContext);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(stepContext);
	ForgetSession();
	pgstat_report_stat(false);
	return error;
}

/* ----------------------------------------------------------------
 * Reasons to leave
 * ----------------------------------------------------------------
 */

/*
 * MustLeave tells whether the worker must leave with more to do, because other subscriptions need
 * one.
 */
static bool
MustLeave(void)
{
	if (!RelayIsCrowded() || MillisecondsSince(began) < SLICE_MS)
		return false;
	leaving = RELAY_UNFINISHED;
	return true;
}

/*
 * IsForeign tells whether another session has caused an error of a transaction.
 */
static bool
IsForeign(int sqlstate)
{
	return sqlstate == ERRCODE_QUERY_CANCELED || sqlstate == ERRCODE_LOCK_NOT_AVAILABLE ||
		   ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_TRANSACTION_ROLLBACK;
}

/*
 * ReportStep shows why the subscription is not served, unless the extension, the subscription
 * or its handler is gone.
 */
static bool
ReportStep(void *argument)
{
	Datum values[2] = {CStringGetTextDatum(name), Int64GetDatum(batch.number)};

	if (OidIsValid(get_extension_oid("idempotency", true)) &&
		ExtensionQueryDo(&findQuery, values, NULL) > 0)
		RelayProblem(&job, get_database_name(MyDatabaseId), ErrorAsText(argument));
	else
		leaving = RELAY_GONE;
	return true;
}

/*
 * LeaveAfter sets why the worker leaves after an error.
 */
static void
LeaveAfter(ErrorData *error)
{
	if (error->sqlerrcode == 0)
		return;
	if (error->sqlerrcode == ERRCODE_IDEMPOTENCY_BATCH_LOST)
	{
		leaving = RELAY_UNFINISHED;
		return;
	}
	leaving = IsForeign(error->sqlerrcode) ? RELAY_BUSY : RELAY_UNFIT;
	if (leaving == RELAY_UNFIT)
		(void) Run(ReportStep, error);
}

/* ----------------------------------------------------------------
 * The subscription
 * ----------------------------------------------------------------
 */

/*
 * Prepare looks up what is needed to serve the subscription, in the current memory context.
 * Returns false, and sets "leaving", if the worker must leave.  "*out" becomes whether the
 * subscription still has the batch.
 */
static bool
Prepare(EventHandler *handler, bool *out)
{
	Datum values[2] = {CStringGetTextDatum(name), Int64GetDatum(batch.number)};
	RelationsLockResult lock = ExtensionRelationsLock(tables, lengthof(tables));
	RelayFound found = {.name = name};
	const char *problem;
	char *function;

	leaving = lock == RELATIONS_BUSY ? RELAY_BUSY : RELAY_GONE;
	if (lock != RELATIONS_LOCKED)
		return false;
	if (ExtensionQueryRun(&findQuery, values, NULL) == 0)
	{
		ExtensionQueryEnd();
		return false;
	}
	found.owner =
		get_role_oid(NameStr(*DatumGetName(ExtensionQueryValue(&findQuery, 0, 1, NULL))), false);
	TopicSetFromPatterns(&found.topics,
						 DatumGetArrayTypeP(ExtensionQueryValue(&findQuery, 0, 3, NULL)));
	found.partitions = DatumGetInt32(ExtensionQueryValue(&findQuery, 0, 4, NULL));
	*out = DatumGetBool(ExtensionQueryValue(&findQuery, 0, 5, NULL));
	function = MemoryContextStrdup(
		stepContext, TextDatumGetCString(ExtensionQueryValue(&findQuery, 0, 2, NULL)));
	ExtensionQueryEnd();

	problem = OwnerProblem(found.owner, MyDatabaseId);
	if (problem != NULL)
		ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg_internal("%s", problem)));
	RelayCorrect(&job, &found);
	if (found.owner != GetSessionUserId())
	{
		leaving = RELAY_UNFINISHED;
		return false;
	}
	leaving = RELAY_DIED;
	EventHandlerFind(function, found.owner, handler);
	return true;
}

/* ----------------------------------------------------------------
 * Fetching
 * ----------------------------------------------------------------
 */

/*
 * Keep copies the result of fetch() into the batch.
 */
static void
Keep(uint64 rows)
{
	MemoryContext caller = MemoryContextSwitchTo(batchContext);

	batch.events = palloc0(rows * sizeof(BatchEvent));
	batch.count = (int) rows;
	for (uint64 row = 0; row < rows; row++)
	{
		BatchEvent *event = &batch.events[row];
		bool isnull;

		event->seq = DatumGetInt64(ExtensionQueryValue(&fetchQuery, row, 2, NULL));
		event->id = *DatumGetUUIDP(ExtensionQueryValue(&fetchQuery, row, 3, NULL));
		event->event = datumCopy(
			SPI_getbinval(SPI_tuptable->vals[row], SPI_tuptable->tupdesc, 4, &isnull), false, -1);
	}
	batch.number = DatumGetInt64(ExtensionQueryValue(&fetchQuery, 0, 1, NULL));
	MemoryContextSwitchTo(caller);
}

/*
 * SetDurability makes the commit of a batch wait for no standby.  If the handler ends the server,
 * that counts as a failure only if this server's disk has the batch.  To flush the first batch of a
 * worker suffices: those before the batch that ends the server are acknowledged, so that the next
 * worker begins with it.
 */
static void
SetDurability(void)
{
	bool follows = hadBatch && synchronous_commit > SYNCHRONOUS_COMMIT_OFF;

	SetLocally("synchronous_commit", follows ? "off" : "local");
}

/*
 * FetchStep fetches a batch, waiting for as many milliseconds as the argument says.
 */
static bool
FetchStep(void *argument)
{
	Interval wait = {.time = *(const long *) argument * INT64CONST(1000)};
	Datum values[3] = {CStringGetTextDatum(name), Int32GetDatum(BATCH_EVENTS),
					   IntervalPGetDatum(&wait)};
	EventHandler handler;
	uint64 rows;
	bool out;

	if (!Prepare(&handler, &out))
		return false;
	RelayFetches(true);
	rows = ExtensionQueryRun(&fetchQuery, values, NULL);
	RelayFetches(false);
	if (rows > 0)
		Keep(rows);
	ExtensionQueryEnd();
	RelayHold(batch.number);
	if (rows == 0 && wait.time == 0)
	{
		bool never;
		Datum due;

		(void) ExtensionQueryRun(&dueQuery, values, NULL);
		hasMore = DatumGetBool(ExtensionQueryValue(&dueQuery, 0, 1, NULL));
		due = ExtensionQueryValue(&dueQuery, 0, 2, &never);
		nextDue = never ? 0 : DatumGetTimestampTz(due);
		ExtensionQueryEnd();
	}
	SetDurability();
	return true;
}

static void
Forget(void)
{
	memset(&batch, 0, sizeof(batch));
	RelayHold(0);
	MemoryContextReset(batchContext);
}

/*
 * Fetch fetches a batch, or forgets it if its commit fails.  Returns false if the worker must
 * leave.
 */
static bool
Fetch(long wait)
{
	ErrorData *error = Run(FetchStep, &wait);

	RelayFetches(false);
	if (error == NULL)
		return true;
	Forget();

	/* A cancel ends the sleep only */
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED && wait > 0)
		return true;
	LeaveAfter(error);
	return false;
}

/* ----------------------------------------------------------------
 * Handling
 * ----------------------------------------------------------------
 */

/*
 * LogUnlogged writes to the log how many dead letters it does not have.
 */
static void
LogUnlogged(void)
{
	if (unlogged > 0)
		ereport(LOG, (errmsg("%d more events of subscription \"%s\" are dead letters now", unlogged,
							 name),
					  errhint("See the view idempotency.dead_letters.")));
	unlogged = 0;
}

static void
LogDeadLetter(const pg_uuid_t *id, const char *error)
{
	static instr_time since;
	static int logged = 0;

	if (logged >= LOGGED_MOST && MillisecondsSince(since) >= LOGGED_MS)
	{
		LogUnlogged();
		logged = 0;
	}
	if (logged == 0)
		INSTR_TIME_SET_CURRENT(since);
	if (logged++ < LOGGED_MOST)
		ereport(LOG,
				(errmsg("event %s of subscription \"%s\" is a dead letter now",
						DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(id))), name),
				 errdetail_internal("%s", ClipForLog(error)),
				 errhint("idempotency.redrive() gives it once more.")));
	else
		unlogged++;
}

/*
 * Nack reports that an event has failed, and gives back what the batch has behind it.  Needs that
 * those before it are acknowledged: nack() finds the event by its id, which another one can have.
 */
static void
Nack(const BatchEvent *failed, const char *error, int sqlstate)
{
	Datum values[5] = {CStringGetTextDatum(name), Int64GetDatum(batch.number),
					   UUIDPGetDatum(&failed->id), CStringGetTextDatum(error),
					   BoolGetDatum(sqlstate == ERRCODE_IDEMPOTENCY_FINAL)};
	static const bool noEvent[] = {false, false, true, false, false};
	bool dead;

	(void) ExtensionQueryRun(&nackQuery, values, NULL);
	(void) ExtensionQueryValue(&nackQuery, 0, 1, &dead);
	ExtensionQueryEnd();
	if (dead)
		LogDeadLetter(&failed->id, error);
	(void) ExtensionQueryDo(&nackQuery, values, noEvent);
}

/*
 * IsOut tells whether the subscription has the batch: a handler can have deleted or moved it.
 */
static bool
IsOut(void)
{
	Datum values[2] = {CStringGetTextDatum(name), Int64GetDatum(batch.number)};
	bool out = ExtensionQueryRun(&findQuery, values, NULL) > 0 &&
			   DatumGetBool(ExtensionQueryValue(&findQuery, 0, 5, NULL));

	ExtensionQueryEnd();
	return out;
}

/*
 * Acknowledge acknowledges the events from batch.next up to "upto", unless the handler has moved or
 * deleted the subscription.  Throws IK408 if the batch does not have all of them any more: the
 * handler has acknowledged or failed one itself, and what it wrote for it must not commit.
 */
static void
Acknowledge(int upto)
{
	int count = upto - batch.next;
	ExtensionQuery *query = upto == batch.count ? &ackAllQuery : &ackQuery;
	Datum values[3] = {CStringGetTextDatum(name), Int64GetDatum(batch.number)};
	Datum *done;
	int64 acknowledged;

	if (count == 0 || (RelayHasChanged() && !IsOut()))
		return;
	done = palloc(count * sizeof(Datum));
	for (int i = 0; i < count; i++)
		done[i] = Int64GetDatum(batch.events[batch.next + i].seq);
	values[2] = PointerGetDatum(
		construct_array(done, count, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
	(void) ExtensionQueryRun(query, values, NULL);
	acknowledged = DatumGetInt64(ExtensionQueryValue(query, 0, 1, NULL));
	ExtensionQueryEnd();
	if (acknowledged != count)
		ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BATCH_LOST),
						errmsg("an event left its batch while it was handled"),
						errhint("Raise an error in the handler instead of calling "
								"idempotency.nack() or idempotency.ack().")));
}

/* What a transaction did with events of the batch. */
typedef struct Handled
{
	int upto;	/* the event after those that were handled */
	bool ended; /* the batch is no longer this worker's */
	bool leave;
} Handled;

/*
 * HandleStep calls the handler with the next events of the batch.  Returns false if the
 * transaction cannot commit: batch.error is set if it is known which event has caused that.
 */
static bool
HandleStep(void *argument)
{
	Handled *handled = argument;
	instr_time start;
	EventHandler handler;
	bool out = false;
	int i;

	INSTR_TIME_SET_CURRENT(start);
	if (!Prepare(&handler, &out))
	{
		handled->leave = true;
		return false;
	}
	handled->ended = !out;
	if (!out)
		return true;
	for (i = batch.next; i < batch.count; i++)
	{
		char *error;
		int sqlstate;

		handled->upto = i + 1;
		if (!EventHandle(&handler, batch.events[i].event, &error, &sqlstate))
		{
			if (TransactionMustAbort())
			{
				batch.error = MemoryContextStrdup(batchContext, error);
				batch.sqlstate = sqlstate;
				return false;
			}
			handled->upto = i;
			Acknowledge(i);
			/* If the handler was replaced, the next transaction calls the new one */
			if (!CallableIsStale(&handler.callable))
			{
				Nack(&batch.events[i], error, sqlstate);
				handled->ended = true;
				handled->leave = MustLeave();
			}
			return true;
		}
		handled->leave = MustLeave();
		if (i < batch.single || MillisecondsSince(start) >= COMMIT_MS || handled->leave ||
			RelayHasChanged())
			break;
	}
	Acknowledge(handled->upto);
	return true;
}

/*
 * NackStep reports that the next event of the batch has failed.
 */
static bool
NackStep(void *argument)
{
	Nack(&batch.events[batch.next], batch.error, batch.sqlstate);
	return true;
}

/*
 * AfterRollback decides what follows a transaction that was rolled back after "upto".  Returns
 * false if the worker must leave.
 */
static bool
AfterRollback(int upto, ErrorData *error)
{
	if (error->sqlerrcode != 0 && IsForeign(error->sqlerrcode))
	{
		leaving = RELAY_BUSY;
		return false;
	}

	/* Find the event that has caused it */
	if (upto - batch.next > 1)
	{
		batch.single = upto;
		batch.error = NULL;
		return true;
	}
	if (batch.error == NULL)
	{
		batch.error = MemoryContextStrdup(batchContext, ErrorAsText(error));
		batch.sqlstate = error->sqlerrcode;
	}
	error = Run(NackStep, NULL);
	batch.error = NULL;
	if (error == NULL || error->sqlerrcode == ERRCODE_IDEMPOTENCY_BATCH_LOST)
	{
		Forget();
		return true;
	}
	LeaveAfter(error);
	return false;
}

/*
 * Handle handles the batch.  Returns false if the worker must leave.
 */
static bool
Handle(void)
{
	while (batch.number != 0)
	{
		Handled handled = {batch.next, false, false};
		ErrorData *error = Run(HandleStep, &handled);

		if (error == NULL && (handled.ended || handled.upto == batch.count))
			Forget();
		else if (error == NULL)
			batch.next = handled.upto;
		else if (handled.upto == batch.next)
		{
			/* The handler was not called */
			LeaveAfter(error);
			return false;
		}
		else if (!AfterRollback(handled.upto, error))
			return false;
		if (error == NULL)
			RelayHandled(&job);
		MemoryContextReset(stepContext);
		if (handled.leave)
			return false;
		WorkerReload();
		if (RelayWorkers == 0)
		{
			leaving = RELAY_UNFINISHED;
			return false;
		}
	}
	return true;
}

/* ----------------------------------------------------------------
 * The worker
 * ----------------------------------------------------------------
 */

/*
 * Serve serves the subscription until it is time to leave it.
 */
static void
Serve(void)
{
	instr_time handledAt;

	INSTR_TIME_SET_CURRENT(began);
	INSTR_TIME_SET_ZERO(handledAt);
	leaving = RELAY_UNFINISHED;
	while (RelayWorkers > 0)
	{
		long left = INSTR_TIME_IS_ZERO(handledAt) || RelayIsCrowded()
						? 0
						: Max(LINGER_MS - MillisecondsSince(handledAt), 0);

		RelayBeginPoll(&job);
		leaving = RELAY_DIED;
		if (!Fetch(left))
			return;
		leaving = RELAY_DIED;
		if (batch.number != 0)
		{
			RelayWantHelp(&job, !hadBatch);
			hadBatch = true;
			if (!Handle())
				return;
			INSTR_TIME_SET_CURRENT(handledAt);
			leaving = RELAY_UNFINISHED;
			if (MustLeave())
				return;
		}
		else if (left == 0 && !hasMore)
		{
			leaving = RELAY_IDLE;
			return;
		}
		MemoryContextReset(stepContext);
		WorkerReload();
	}
	leaving = RELAY_UNFINISHED;
}

/*
 * HasFailed tells whether the batch has failed with the worker: an error that is not the
 * handler's, or the end of the grace of a handler.
 */
static bool
HasFailed(void)
{
	return !terminated && leaving == RELAY_DIED;
}

/*
 * Detach tells how the worker has left.  A batch that it could not give back is given back while
 * the server runs.
 */
static void
Detach(int code, Datum arg)
{
	LogUnlogged();
	RelayLeave(&job, terminated ? RELAY_RECALLED : leaving, nextDue, hadBatch, !HasFailed());
}

/*
 * GiveBackAtExit gives the batch back, unless another session has locked what that needs: no signal
 * ends a wait at this point, and a wait would keep the server from stopping.
 */
static void
GiveBackAtExit(int code, Datum arg)
{
	Datum values[2];
	uint64 given = 0;
	instr_time since;

	AbortOutOfAnyTransaction();
	if (batch.number == 0 || HasFailed())
		return;
	INSTR_TIME_SET_CURRENT(since);
	Begin();
	values[0] = CStringGetTextDatum(name);
	values[1] = Int64GetDatum(batch.number);
	if (ExtensionRelationLock("subscription", AccessShareLock, true) &&
		ExtensionRelationLock("partition", RowShareLock, true) &&
		ExtensionRelationLock("position", RowExclusiveLock, true))
	{
		SetLocally("synchronous_commit", "local");
		while ((given = ExtensionQueryDo(&giveBackQuery, values, NULL)) == 0 &&
			   MillisecondsSince(since) < GIVE_BACK_MS)
			pg_usleep(10000L);
	}
	Commit();
	if (given > 0)
		RelayHold(0);
}

static void
Terminate(SIGNAL_ARGS)
{
	terminated = true;
	die(SIGNAL_PASS);
}

/*
 * Refused gets the error with which the worker could not connect.  The log gets it once.
 */
static void
Refused(ErrorData *error)
{
	leaving = RELAY_UNFIT;
	error->output_to_server = false;
	RelayProblem(&job, psprintf("%u", job.database), error->message);
}

void
idempotency_relay_main(Datum unused)
{
	memcpy(&job, MyBgworkerEntry->bgw_extra, sizeof(RelayJob));
	if (!RelayAttach(&job, name, sizeof(name)))
		proc_exit(0);
	before_shmem_exit(Detach, (Datum) 0);

	WorkerConnectAs(job.database, job.owner, Refused);
	pqsignal(SIGTERM, Terminate);
	batchContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
	stepContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency step", ALLOCSET_DEFAULT_SIZES);
	before_shmem_exit(GiveBackAtExit, (Datum) 0);

	RefuseSetConstraints();
	set_ps_display(psprintf("subscription %s", name));
	pgstat_report_activity(STATE_RUNNING, psprintf("serving subscription \"%s\"", name));
	Serve();
	proc_exit(0);
}
