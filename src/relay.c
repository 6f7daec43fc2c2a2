/*-------------------------------------------------------------------------
 *
 * relay.c
 *	  The worker that gives the events of a subscription to its handler.
 *
 * It connects as the owner of the subscription and works in steps of a transaction
 * each.  A step gives the batch that is out to the handler, event by event
 * (relayevent.c), parks the events that failed, acknowledges the batch, and fetches
 * the next one.  So the handler's writes and the position commit together.  That
 * a batch is out is committed before the handler sees any of it:
 *
 *		step 1		fetch A
 *		step 2		handle A, acknowledge A, fetch B
 *		step 3		handle B, acknowledge B, nothing to fetch
 *
 * Whoever comes to a subscription and finds a batch out knows that his predecessor
 * did not survive it, or could not commit it.  Then its events are given one by
 * one, each as a batch of its own; and one that is such a batch has failed, which
 * counts as an attempt.  So one that kills its worker becomes a dead letter like
 * any other.  The same is done when a transaction fails outside the handler: when
 * a claim was lost, say.  A batch that no handler has seen, and one that was out
 * when the server was stopped, are given again as they were.
 *
 * The worker leaves when it has found nothing for LINGER_MS; or after SLICE_MS, if
 * others wait for a worker or somebody is to drop or copy the database, in the
 * middle of a batch if need be.  Before it leaves for want of events, it arms the
 * bell and looks once more (relaybell.c).  If the subscription whose turn is next is
 * of the same owner and database, it goes on with that one.
 *
 * Locks: the subscription's, in each step, to its end.  It is waited for, but not
 * for long.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>
#include <signal.h>

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "tcop/tcopprot.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/pidfile.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "databases.h"
#include "delivery.h"
#include "errors.h"
#include "guc.h"
#include "outboxerrors.h"
#include "outboxtable.h"
#include "owntable.h"
#include "parked.h"
#include "relay.h"
#include "relaybell.h"
#include "relayevent.h"
#include "relaynote.h"
#include "relayregistry.h"
#include "subscription.h"
#include "wakeup.h"
#include "worker.h"
#include "xact.h"

/* How long a worker stays: with nothing to do, and at others' cost. */
#define LINGER_MS 250
#define SLICE_MS 1000

/* How long it waits for whoever is at the subscription. */
#define LOCK_MS 500

/*
 * So many events are a batch, or fewer: each is a subtransaction, and the server
 * keeps 64 of those at hand, so that others' snapshots stay cheap.
 */
#define BATCH_EVENTS 60

/* How long a batch that a worker has left behind is kept from a consumer. */
static const Interval lease = {.time = 30 * USECS_PER_SEC};

/* What is noted of an event that ends its worker. */
#define KILLED "the worker ended while it handled this event"

typedef enum Step
{
	STEP_SERVED, /* there may be more */
	STEP_NOTHING,
	STEP_LEAVE /* leaving says why */
} Step;

static RelayTask task;
static bool attached = false; /* to the task, and nobody else is */
static instr_time came;

/* How we leave, and when there is something to do again. */
static RelayEnd leaving = RELAY_DIED;
static TimestampTz nextDue = 0;

/* The batch that is out, each in one of two contexts; number 0: none is. */
static Batch out;
static bool touched; /* the handler has seen some of it */
static bool blamed;	 /* and if there is an error now, that is why */
static MemoryContext outContext;
static MemoryContext nextContext; /* for the batch that is being fetched */
static MemoryContext stepContext; /* for anything else */

/* What the predecessor has left behind was dealt with. */
static bool inherited = false;

/* Why the batch that was out could not be committed, or NULL. */
static text *failure = NULL;

/* SIGTERM may wait: nothing is in progress. */
static volatile sig_atomic_t atRest = false;

/* ----------------------------------------------------------------
 * Reasons to leave
 * ----------------------------------------------------------------
 */

static Step
Leave(RelayEnd why)
{
	leaving = why;
	return STEP_LEAVE;
}

/*
 * LeaveUnfit leaves a subscription that cannot be served as it is, which the log
 * and the subscription are told once; the survey tells it, if somebody else is at
 * the subscription.  Needs a transaction.
 */
static Step
LeaveUnfit(const Subscription *subscription, const char *problem)
{
	bool locked = SubscriptionLock(subscription->name, 0);

	if (RegistryNoteProblem(&task, problem, locked))
	{
		LogRelayProblem(get_database_name(MyDatabaseId), task.number, problem);
		if (locked)
			SubscriptionNoteError(subscription->name, cstring_to_text(problem));
	}
	return Leave(RELAY_UNFIT);
}

/*
 * IsWantedElsewhere tells whether it is time to make room: for others who wait
 * for a worker, or for whoever is to drop or copy the database.
 */
static bool
IsWantedElsewhere(void)
{
	return WorkerElapsed(came) >= SLICE_MS &&
		   (RegistryOthersWait(RelayWorkers) || !DatabaseIsOpen(MyDatabaseId));
}

/*
 * Terminate is the handler of SIGTERM: at rest we leave at our own time, at work
 * at once.
 */
static void
Terminate(SIGNAL_ARGS)
{
	if (atRest)
		SignalHandlerForShutdownRequest(postgres_signal_arg);
	else
		die(postgres_signal_arg);
}

/* ----------------------------------------------------------------
 * The batch
 * ----------------------------------------------------------------
 */

/*
 * Fail parks an event of a batch that the handler did not take.  Returns whether
 * those behind it wait.
 */
static bool
Fail(const Subscription *subscription, const Batch *batch, const ListCell *event, const text *error)
{
	if (DeliveryFail(subscription, batch->number, batch->events, event, error) != 0)
		return true;
	LogDeadLetter(subscription->name, lfirst(event), error);
	return false;
}

/*
 * Inherit deals with a batch that is out though nobody is at it.
 */
static void
Inherit(const Subscription *subscription)
{
	Batch left;

	if (inherited || !DeliveryOutstanding(subscription, &left))
		return;
	if (left.events == NIL || left.number == RegistryUntouched(&task))
		DeliveryGiveBack(subscription, left.number, false);
	else if (list_length(left.events) > 1)
		DeliveryGiveBack(subscription, left.number, true);
	else
	{
		const text *why = failure != NULL ? failure : cstring_to_text(KILLED);

		(void) Fail(subscription, &left, list_head(left.events), why);
		DeliveryAck(subscription, left.number);
	}
}

/*
 * IsHeld tells whether an event waits behind one of its aggregate that has failed
 * in this batch.
 */
static bool
IsHeld(const Event *event, const List *failed)
{
	ListCell *cell;

	foreach (cell, failed)
	{
		if (EventsShareAggregate(event, lfirst(cell)))
			return true;
	}
	return false;
}

/*
 * KeepFailure keeps why the batch that is out cannot be committed, for the step
 * that deals with it.
 */
static void
KeepFailure(const text *why)
{
	MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);

	if (failure == NULL)
		failure = TextCopy(why);
	MemoryContextSwitchTo(caller);
}

static void
ForgetFailure(void)
{
	if (failure != NULL)
		pfree(failure);
	failure = NULL;
}

/*
 * CheckFailure throws what leaves no way but to roll the batch back: that the
 * transaction cannot commit any more; or that the handler is no longer what it
 * was, which then is why it failed, and no event's fault.
 */
static void
CheckFailure(const Subscription *subscription, const EventHandler *handler, const text *error)
{
	EventHandler now;

	if (TransactionIsDoomed())
	{
		blamed = true;
		KeepFailure(error);
		CheckClaims();
	}
	EventHandlerFind(subscription, handler->owner, &now);
	if (now.function.fn_oid != handler->function.fn_oid)
		ErrorEventHandlerReplaced(subscription->handler);
}

/*
 * HandleEvent gives an event of the batch that is out to the handler.  If that
 * fails, and those behind it have to wait, it is added to "failed".
 */
static void
HandleEvent(const Subscription *subscription, EventHandler *handler, ListCell *cell, List **failed)
{
	text *error;

	if (IsHeld(lfirst(cell), *failed) || EventHandle(handler, lfirst(cell), &error))
		return;
	CheckFailure(subscription, handler, error);
	if (Fail(subscription, &out, cell, error))
		*failed = lappend(*failed, lfirst(cell));
}

/*
 * Rest returns the events of the batch behind one that do not wait for any that
 * failed.
 */
static List *
Rest(const ListCell *cell, const List *failed)
{
	List *rest = NIL;

	for_each_cell(cell, out.events, lnext(out.events, cell))
	{
		if (!IsHeld(lfirst(cell), failed))
			rest = lappend(rest, lfirst(cell));
	}
	return rest;
}

/*
 * HasGone tells whether a handler has removed the subscription.
 */
static bool
HasGone(void)
{
	return RelayHasNotes() && SubscriptionFindNumber(task.number) == NULL;
}

/*
 * HandleBatch gives the events of the batch that is out to the handler, and
 * acknowledges them; but not those that are left when we are wanted elsewhere.
 * Returns false if the handler has removed the subscription.
 */
static bool
HandleBatch(const Subscription *subscription, EventHandler *handler)
{
	List *failed = NIL;
	List *rest = NIL;
	ListCell *cell;

	touched = true;
	foreach (cell, out.events)
	{
		HandleEvent(subscription, handler, cell, &failed);
		if (HasGone())
			return false;
		if (IsWantedElsewhere())
		{
			rest = Rest(cell, failed);
			break;
		}
	}
	if (rest != NIL)
		DeliveryAckPart(subscription, out.number, rest);
	else
		DeliveryAck(subscription, out.number);
	return true;
}

/* ----------------------------------------------------------------
 * Steps
 * ----------------------------------------------------------------
 */

/*
 * FindSubscription finds and locks the subscription, and before that the
 * relations that delivery and handlers may need.  Returns NULL if that is not
 * possible, and we leave.
 */
static Subscription *
FindSubscription(void)
{
	static const char *const relations[] = {"subscription", "position", "parked", "outbox",
											"outbox_seq",	"key",		"token"};
	OwnLock lock = OwnRelationsLock(relations, lengthof(relations));
	Subscription *subscription = NULL;

	leaving = RELAY_GONE;
	if (lock == OWN_LOCKED)
		subscription = SubscriptionFindNumber(task.number);
	if (lock == OWN_BUSY ||
		(subscription != NULL && !SubscriptionLock(subscription->name, LOCK_MS)))
	{
		leaving = RELAY_BUSY;
		return NULL;
	}

	/* Whoever had the lock may have changed it. */
	if (subscription != NULL)
		subscription = SubscriptionFindNumber(task.number);
	return subscription == NULL || subscription->handler == NULL ? NULL : subscription;
}

/*
 * ShowTask lets pg_stat_activity, and ps, say whom we serve.
 */
static void
ShowTask(const Subscription *subscription)
{
	const char *name = text_to_cstring(subscription->name);

	pgstat_report_activity(STATE_RUNNING, psprintf("serving subscription \"%s\"", name));
	if (!inherited)
		set_ps_display(psprintf("subscription %s", name));
}

/*
 * Prepare locks the subscription and looks up what is needed to serve it.
 * Returns NULL if it cannot be, and we leave.
 */
static Subscription *
Prepare(EventHandler *handler)
{
	Subscription *subscription = FindSubscription();
	Oid owner;

	if (subscription == NULL)
		return NULL;
	owner = get_role_oid(subscription->owner, true);
	leaving = RELAY_UNFIT;
	if (!OidIsValid(owner))
		LeaveUnfit(subscription, psprintf("role \"%s\" does not exist", subscription->owner));
	else if (superuser_arg(owner))
		LeaveUnfit(subscription, psprintf("owner \"%s\" is a superuser", subscription->owner));
	else if (owner != GetSessionUserId())
	{
		RegistryConfirm(MyDatabaseId, task.number, owner, true, 0);
		leaving = RELAY_GOES_ON;
	}
	else
	{
		ShowTask(subscription);
		EventHandlerFind(subscription, owner, handler);
		leaving = RELAY_DIED;
		return subscription;
	}
	return NULL;
}

/*
 * KeepSafely makes sure that a batch is out on this server's disk before the
 * handler sees it, since it might end the server.  That is all that the commit of
 * a step has to wait for in which no handler wrote.
 */
static void
KeepSafely(bool handled)
{
	if (!handled || synchronous_commit == SYNCHRONOUS_COMMIT_OFF)
		(void) set_config_option("synchronous_commit", "local", PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_LOCAL, true, 0, false);
}

/*
 * FetchNext fills "next" with the next batch.  One among whose events there is
 * one that has ended a worker before is given singly.
 */
static void
FetchNext(const Subscription *subscription, bool last, Batch *next)
{
	FetchPlan plan = {.max = BATCH_EVENTS, .lease = &lease, .last = last};
	MemoryContext caller = MemoryContextSwitchTo(nextContext);

	DeliveryFetch(subscription, &plan, next);
	if (list_length(next->events) > 1 &&
		ParkedHasError(subscription->name, next->events, cstring_to_text(KILLED)))
	{
		DeliveryGiveBack(subscription, next->number, true);
		DeliveryFetch(subscription, &plan, next);
	}
	MemoryContextSwitchTo(caller);
}

/*
 * DoStep does what a transaction does, and fills "next" with the batch that is
 * out when it has committed.
 */
static Step
DoStep(bool last, Batch *next)
{
	EventHandler handler;
	Subscription *subscription = Prepare(&handler);
	bool handled = out.number != 0;

	if (subscription == NULL)
	{
		if (handled)
			RegistrySetUntouched(&task, out.number);
		return STEP_LEAVE;
	}
	if (!handled)
		Inherit(subscription);
	else if (!HandleBatch(subscription, &handler))
		return Leave(RELAY_GONE);
	if (handled && IsWantedElsewhere())
		return Leave(RELAY_GOES_ON);

	FetchNext(subscription, last, next);
	if (next->events != NIL)
		KeepSafely(handled);
	else
	{
		next->number = 0;
		nextDue = next->next;
	}
	return handled || next->wrote ? STEP_SERVED : STEP_NOTHING;
}

/*
 * AfterError draws the conclusions from an error that EventHandle() has not
 * caught.  If the batch is to blame, the next step deals with it; if not, it is as
 * if no handler had seen it, and something is in our way.
 */
static Step
AfterError(const ErrorData *error)
{
	Subscription *subscription;
	Step step;

	if (out.number != 0 && !blamed)
		RegistrySetUntouched(&task, out.number);
	out.number = 0;
	inherited = false;
	if (blamed)
	{
		KeepFailure(ErrorAsText(error));
		return STEP_SERVED;
	}
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED ||
		error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE ||
		ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_TRANSACTION_ROLLBACK)
		return Leave(RELAY_BUSY);

	/* Where the extension is gone, or an older one has come, nobody is missed. */
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = OidIsValid(get_extension_oid("idempotency", true)) &&
						   OidIsValid(OwnRelationByName("subscription"))
					   ? SubscriptionFindNumber(task.number)
					   : NULL;
	step = subscription != NULL ? LeaveUnfit(subscription, text_to_cstring(ErrorAsText(error)))
								: Leave(RELAY_GONE);
	PopActiveSnapshot();
	CommitTransactionCommand();
	return step;
}

/*
 * PutOut notes, when a step has committed, which batch is out.
 */
static void
PutOut(const Batch *next)
{
	MemoryContext old = outContext;

	out = *next;
	touched = false;
	outContext = nextContext;
	nextContext = old;
	MemoryContextReset(nextContext);

	inherited = true;
	ForgetFailure();
}

/*
 * TryStep does a step, and says what came of it.  After an error it is as if the
 * step had not been, but for what AfterError() says.
 */
static Step
TryStep(bool last)
{
	volatile Step step = STEP_LEAVE;
	Batch next = {0};

	blamed = false;
	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		MemoryContextSwitchTo(stepContext);
		PushActiveSnapshot(GetTransactionSnapshot());
		step = DoStep(last, &next);
		PopActiveSnapshot();
		blamed = touched;
		CommitTransactionCommand();
		PutOut(&next);
		if (step != STEP_LEAVE)
			leaving = RELAY_GOES_ON;
	}
	PG_CATCH();
	{
		ErrorData *error;

		MemoryContextSwitchTo(stepContext);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		MemoryContextSwitchTo(stepContext);
		MemoryContextReset(nextContext);
		step = AfterError(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(TopMemoryContext);
	MemoryContextReset(stepContext);
	ForgetSession();
	pgstat_report_stat(false);
	return step;
}

/* ----------------------------------------------------------------
 * The worker
 * ----------------------------------------------------------------
 */

/*
 * Sleep sleeps until something is published, or for "ms" milliseconds.  A cancel
 * is no reason to leave.
 */
static void
Sleep(long ms)
{
	pgstat_report_activity(STATE_IDLE, NULL);
	PG_TRY();
	{
		atRest = true;
		if (!ShutdownRequestPending)
			WakeupSleep(OutboxChannel(), 0, ms);
		atRest = false;
	}
	PG_CATCH();
	{
		atRest = false;
		if (geterrcode() != ERRCODE_QUERY_CANCELED)
			PG_RE_THROW();
		FlushErrorState();
	}
	PG_END_TRY();
	WakeupCancel();
}

/*
 * SleepTime returns for how many milliseconds we sleep when nothing was found; 0 if
 * it is time to leave.
 */
static long
SleepTime(bool served, instr_time servedAt)
{
	long left = LINGER_MS - WorkerElapsed(servedAt);

	if (!served || RegistryOthersWait(RelayWorkers))
		return 0;
	if (nextDue != 0)
		left = Min(left, TimestampDifferenceMilliseconds(GetCurrentTimestamp(), nextDue) + 1);
	return Max(left, 0);
}

/*
 * Serve does steps for the subscription until it is time to leave it.
 */
static void
Serve(void)
{
	bool served = false;
	bool last = false;
	instr_time servedAt;

	INSTR_TIME_SET_CURRENT(came);
	servedAt = came;
	leaving = RELAY_GOES_ON;
	nextDue = 0;
	while (!ShutdownRequestPending && RelayWorkers > 0)
	{
		Step step;
		long ms;

		if (out.number == 0)
		{
			RegistryBeginLook(&task);
			WakeupPrepare(OutboxChannel());
		}
		step = TryStep(last);
		if (step == STEP_LEAVE)
			return;
		if (step == STEP_SERVED)
		{
			served = true;
			last = false;
			INSTR_TIME_SET_CURRENT(servedAt);
		}
		else if (last)
		{
			leaving = RELAY_IDLE;
			return;
		}
		else if ((ms = SleepTime(served, servedAt)) > 0)
			Sleep(ms);
		else
		{
			BellArm(MyDatabaseId);
			last = true;
		}
		WorkerReload();
	}
}

/*
 * MoveOn leaves the subscription, and takes up the next one, if there is one that
 * we can serve as who we are.  Returns whether there is.
 */
static bool
MoveOn(void)
{
	RelayTask next;
	bool open;

	if (out.number != 0 || ShutdownRequestPending)
		return false;
	StartTransactionCommand();
	open = DatabaseIsOpen(MyDatabaseId);
	CommitTransactionCommand();
	if (!open)
		return false;

	attached = RegistryMoveOn(&task, leaving, nextDue, RelayWorkers, &next);
	if (attached)
		task = next;
	inherited = false;
	ForgetFailure();
	return attached;
}

/* ----------------------------------------------------------------
 * The end
 * ----------------------------------------------------------------
 */

/*
 * SayGoodbye tells the registry how we have left.
 */
static void
SayGoodbye(int code, Datum arg)
{
	if (attached)
		RegistryLeave(&task, leaving, nextDue);
}

/*
 * ServerIsStopping tells whether somebody is stopping the server, as opposed to
 * this worker: the postmaster notes it in its lock file.
 */
static bool
ServerIsStopping(void)
{
	char content[1024];
	char *line = content;
	int file = BasicOpenFile("postmaster.pid", O_RDONLY);
	ssize_t length = file < 0 ? -1 : read(file, content, sizeof(content) - 1);

	if (file >= 0)
		close(file);
	if (length < 0)
		return false;
	content[length] = '\0';
	for (int i = 1; i < LOCK_FILE_LINE_PM_STATUS && line != NULL; i++)
	{
		line = strchr(line, '\n');
		line += line != NULL;
	}
	return line != NULL && strncmp(line, PM_STATUS_STOPPING, strlen(PM_STATUS_STOPPING)) == 0;
}

/*
 * GiveBackAtStop gives the batch that is out back, if the server is being stopped:
 * then none of its events is to blame.  What the handler did with them is rolled
 * back.
 */
static void
GiveBackAtStop(int code, Datum arg)
{
	Subscription *subscription;

	if (out.number == 0 || !ServerIsStopping())
		return;
	AbortOutOfAnyTransaction();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = SubscriptionFindNumber(task.number);
	if (subscription != NULL && SubscriptionLock(subscription->name, 0))
		DeliveryGiveBack(subscription, out.number, false);
	PopActiveSnapshot();
	CommitTransactionCommand();
}

/*
 * Refused is told why we could not connect.  The log gets it once.
 */
static void
Refused(ErrorData *error)
{
	leaving = RELAY_UNFIT;
	if (RegistryNoteProblem(&task, error->message, false))
		error->elevel = LOG;
	else
		error->output_to_server = false;
}

/*
 * idempotency_relay_main is the worker.
 */
void
idempotency_relay_main(Datum unused)
{
	memcpy(&task, MyBgworkerEntry->bgw_extra, sizeof(RelayTask));
	attached = RegistryAttach(&task);
	if (!attached)
		proc_exit(0);
	before_shmem_exit(SayGoodbye, (Datum) 0);

	WorkerConnectAs(task.database, task.owner, Refused);
	pqsignal(SIGTERM, Terminate);
	before_shmem_exit(GiveBackAtStop, (Datum) 0);

	outContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
	nextContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
	stepContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency step", ALLOCSET_DEFAULT_SIZES);
	do
		Serve();
	while (MoveOn());
	proc_exit(0);
}
