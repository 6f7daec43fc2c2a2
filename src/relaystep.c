/*-------------------------------------------------------------------------
 *
 * relaystep.c
 *	  One step of a worker of the relay, which is a transaction.
 *
 * A step locks the subscription and looks whether it can be served: its owner may be
 * gone, and the handler, too.  Then it gives the batch that is out to the handler
 * (relaybatch.c), acknowledges it, or what fits into a transaction (relaystay.c), and fetches
 * the next one.  So the handler's writes
 * and the position commit together.
 *
 * After an error it is as if the step had not been.  If the batch is to blame, the
 * next step deals with it; if somebody was in the way, the subscription is left for a
 * moment; anything else is a problem, which the log and the subscription are told.
 *
 * Locks: that of the database (relaystay.c); ACCESS SHARE on the relations that delivery and
 *handlers may need, taken first and not waited for, and the subscription's, waited for LOCK_MS; to
 *the end of the step.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"

#include "guc.h"
#include "outboxerrors.h"
#include "owntable.h"
#include "relayinternal.h"
#include "serverlog.h"

/* How long it waits for whoever is at the subscription. */
#define LOCK_MS 500

/* Why the worker is to leave, if it is. */
static RelayEnd conclusion;

/* The last step has not come to the end of what there is to look at. */
static bool looksOn = false;

static MemoryContext stepContext; /* for anything but batches */

/*
 * RelayStepInit prepares for steps; called once.
 */
void
RelayStepInit(void)
{
	stepContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency step", ALLOCSET_DEFAULT_SIZES);
	RelayBatchInit();
}

/*
 * RelayStepCommitHere lets the commit of this transaction wait for this server's disk,
 * and for no standby.
 */
void
RelayStepCommitHere(void)
{
	(void) set_config_option("synchronous_commit", "local", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
}

/* ----------------------------------------------------------------
 * Reasons to leave
 * ----------------------------------------------------------------
 */

static Step
Leave(RelayEnd why)
{
	conclusion = why;
	return STEP_LEAVE;
}

/*
 * LeaveUnfit leaves a subscription that cannot be served as it is, which the log
 * and the subscription are told once; the survey tells it, if somebody else is at
 * the subscription.  Needs a transaction.
 */
static Step
LeaveUnfit(const RelayTask *task, const Subscription *subscription, const char *problem)
{
	bool locked = SubscriptionLock(subscription->name, 0);

	if (RegistryNoteProblem(task, problem, locked))
	{
		LogRelayProblem(get_database_name(MyDatabaseId), task->number, problem);
		if (locked)
			SubscriptionNoteError(subscription->name, cstring_to_text(problem));
	}
	return Leave(RELAY_UNFIT);
}

/* ----------------------------------------------------------------
 * What a step needs
 * ----------------------------------------------------------------
 */

/*
 * FindSubscription finds and locks the subscription, and before that the
 * relations that delivery and handlers may need.  Returns NULL if that is not
 * possible, and we leave.
 */
static Subscription *
FindSubscription(const RelayTask *task)
{
	static const char *const relations[] = {"subscription", "position", "parked", "outbox",
											"outbox_seq",	"key",		"token"};
	OwnLock lock = OwnRelationsLock(relations, lengthof(relations));
	Subscription *subscription = NULL;

	if (lock == OWN_LOCKED)
		subscription = SubscriptionFindNumber(task->number);
	if (lock == OWN_BUSY ||
		(subscription != NULL && !SubscriptionLock(subscription->name, LOCK_MS)))
	{
		(void) Leave(RELAY_BUSY);
		return NULL;
	}

	/* Whoever had the lock may have changed it. */
	if (subscription != NULL)
		subscription = SubscriptionFindNumber(task->number);
	if (subscription != NULL && subscription->handler != NULL)
		return subscription;
	(void) Leave(RELAY_GONE);
	return NULL;
}

/*
 * ShowTask lets pg_stat_activity, and ps, say whom we serve.
 */
static void
ShowTask(const Subscription *subscription)
{
	static int64 shown = 0;
	const char *name = text_to_cstring(subscription->name);

	pgstat_report_activity(STATE_RUNNING, psprintf("serving subscription \"%s\"", name));
	if (shown != subscription->number)
		set_ps_display(psprintf("subscription %s", name));
	shown = subscription->number;
}

/*
 * Prepare locks the subscription and looks up what is needed to serve it.
 * Returns NULL if it cannot be, and we leave.
 */
static Subscription *
Prepare(const RelayTask *task, EventHandler *handler)
{
	Subscription *subscription = FindSubscription(task);
	Oid owner;

	if (subscription == NULL)
		return NULL;
	owner = get_role_oid(subscription->owner, true);
	if (!OidIsValid(owner))
		(void) LeaveUnfit(task, subscription,
						  psprintf("role \"%s\" does not exist", subscription->owner));
	else if (superuser_arg(owner))
		(void) LeaveUnfit(task, subscription,
						  psprintf("owner \"%s\" is a superuser", subscription->owner));
	else if (owner != GetSessionUserId())
	{
		TopicSet wants;

		TopicSetFromPatterns(&wants, &subscription->topics);
		RegistryConfirm(MyDatabaseId, task->number, owner, &wants, true, 0);
		(void) Leave(RELAY_GOES_ON);
	}
	else
	{
		ShowTask(subscription);
		EventHandlerFind(subscription, owner, handler);
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
		RelayStepCommitHere();
}

/* ----------------------------------------------------------------
 * The step
 * ----------------------------------------------------------------
 */

/*
 * InTransaction does what a step does, and fills "next" with the batch that is out
 * when it has committed.
 */
static Step
InTransaction(const RelayTask *task, bool last, Batch *next)
{
	EventHandler handler;
	Subscription *subscription = Prepare(task, &handler);
	bool handled = RelayBatchIsOut();
	bool mayLeave = handled || looksOn;

	looksOn = false;
	if (subscription == NULL)
	{
		RelayBatchLeave(task);
		return STEP_LEAVE;
	}
	if (!RelayStayEnterDatabase())
	{
		/* A copy of the database must not find a batch that seems to have been handled. */
		if (handled)
			RelayBatchGiveBack(subscription);
		return Leave(RELAY_BUSY);
	}
	if (!handled)
		RelayBatchInherit(task, subscription);
	else if (!RelayBatchHandle(task, subscription, &handler))
		return Leave(RELAY_GONE);
	if (mayLeave && RelayStayIsOver())
		return Leave(RELAY_GOES_ON);

	RelayBatchFetch(subscription, last, next);
	if (next->events != NIL)
		KeepSafely(handled);
	looksOn = next->more;
	if (handled || next->events != NIL || looksOn)
		return STEP_SERVED;

	/* To have passed by what is for others is no reason to keep them waiting. */
	return next->wrote && !(last && RegistryOthersWait(RelayWorkers)) ? STEP_SERVED : STEP_NOTHING;
}

/*
 * AfterError draws the conclusions from an error that EventHandle() has not
 * caught.
 */
static Step
AfterError(const RelayTask *task, const ErrorData *error)
{
	Subscription *subscription;
	Step step;

	if (RelayBatchRolledBack(task, error))
		return STEP_SERVED;
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED ||
		error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE ||
		ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_TRANSACTION_ROLLBACK)
		return Leave(RELAY_BUSY);

	/* Where the extension is gone, or an older one has come, nobody is missed. */
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = OidIsValid(get_extension_oid("idempotency", true)) &&
						   OidIsValid(OwnRelationByName("subscription"))
					   ? SubscriptionFindNumber(task->number)
					   : NULL;
	step = subscription != NULL
			   ? LeaveUnfit(task, subscription, text_to_cstring(ErrorAsText(error)))
			   : Leave(RELAY_GONE);
	PopActiveSnapshot();
	CommitTransactionCommand();
	return step;
}

/*
 * RelayStepDo does a step, says what came of it, and sets why the worker leaves, if it
 * is to; and when there is something to do again, if nothing was found.  From its
 * beginning to its end nobody gets another role, whoever's code the commit runs.
 */
Step
RelayStepDo(const RelayTask *task, bool last, RelayEnd *end, TimestampTz *nextDue)
{
	volatile Step step = STEP_LEAVE;
	Batch next = {0};
	Oid user;
	int context;

	RelayStayBeginStep();
	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		GetUserIdAndSecContext(&user, &context);
		SetUserIdAndSecContext(user, context | SECURITY_LOCAL_USERID_CHANGE);
		MemoryContextSwitchTo(stepContext);
		PushActiveSnapshot(GetTransactionSnapshot());
		step = InTransaction(task, last, &next);
		PopActiveSnapshot();
		RelayBatchBlame();
		InjectionPoint("relay-commit");
		CommitTransactionCommand();
		SetUserIdAndSecContext(user, context);

		/* What has committed is put out before a cancel, or SIGTERM, is taken. */
		HOLD_INTERRUPTS();
		InjectionPoint("relay-putout");
		RelayBatchPutOut(task, &next);
		RESUME_INTERRUPTS();
		if (step == STEP_NOTHING)
			*nextDue = next.next;
	}
	PG_CATCH();
	{
		ErrorData *error;

		MemoryContextSwitchTo(stepContext);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		MemoryContextSwitchTo(stepContext);
		step = AfterError(task, error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(TopMemoryContext);
	MemoryContextReset(stepContext);
	ForgetSession();
	pgstat_report_stat(false);

	*end = step == STEP_LEAVE ? conclusion : RELAY_GOES_ON;
	return step;
}
