/*-------------------------------------------------------------------------
 *
 * relay/step.c
 *	  One step of a worker of the relay, which is a transaction.
 *
 * A step locks the subscription, checks that it can be run, calls the handler with
 * the batch in flight (relay/batch.c), acknowledges the batch, and fetches the next
 * one.  So the handler's writes and the position commit together.
 *
 * An error rolls the step back.  If the batch has caused it, the next step finds the
 * event by batches of one; if another session has, the subscription backs off; any other
 * error is a problem that the log and the subscription show.
 *
 * Locks, to the end of the step: ACCESS SHARE on the relations that delivery and handlers
 * may need, taken first and not waited for; the subscription's, waited for LOCK_MS; ROW
 * EXCLUSIVE on the database, not waited for.
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
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "base/database.h"
#include "base/relation.h"
#include "relay/worker.h"

/* How long it waits for the lock of the subscription. */
#define LOCK_MS 500

/* Why the worker must leave, after STEP_LEAVE. */
static RelayEnd conclusion;

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
 * RelayCommitLocally makes the commit of this transaction wait for this server's disk,
 * and for no standby.
 */
void
RelayCommitLocally(void)
{
	(void) set_config_option("synchronous_commit", "local", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
}

/* ----------------------------------------------------------------
 * Reasons to leave
 * ----------------------------------------------------------------
 */

static RelayStep
Leave(RelayEnd why)
{
	conclusion = why;
	return STEP_LEAVE;
}

/*
 * LeaveUnfit leaves a subscription that cannot be run as it is.  The log and last_error
 * show the problem, once; if the subscription is locked now, the survey writes both.
 * Needs a transaction.
 */
static RelayStep
LeaveUnfit(const RelayJob *job, const Subscription *subscription, const char *problem)
{
	if (RegistrySetProblem(job, problem) && SubscriptionLock(subscription->name, 0))
	{
		LogRelayProblem(subscription->name, problem);
		(void) SubscriptionSetError(subscription->name, cstring_to_text(problem));
	}
	return Leave(RELAY_UNFIT);
}

/* ----------------------------------------------------------------
 * What a step needs
 * ----------------------------------------------------------------
 */

/*
 * FindSubscription finds and locks the subscription, and before that the
 * relations that delivery and handlers may need.  Returns NULL if the worker must
 * leave.
 */
static Subscription *
FindSubscription(const RelayJob *job)
{
	static const char *const relations[] = {"subscription", "position", "parked", "outbox",
											"outbox_seq",	"key",		"token"};
	RelationsLockResult lock = ExtensionRelationsLock(relations, lengthof(relations));
	Subscription *subscription = NULL;

	if (lock == RELATIONS_LOCKED)
		subscription = SubscriptionFindNumber(job->number);
	if (lock == RELATIONS_BUSY ||
		(subscription != NULL && !SubscriptionLock(subscription->name, LOCK_MS)))
	{
		(void) Leave(RELAY_BUSY);
		return NULL;
	}

	/* The previous owner of the lock may have changed it. */
	if (subscription != NULL)
		subscription = SubscriptionFindNumber(job->number);
	if (subscription != NULL && subscription->handler != NULL)
		return subscription;
	(void) Leave(RELAY_GONE);
	return NULL;
}

/*
 * ShowJob shows the subscription in pg_stat_activity and in ps.
 */
static void
ShowJob(const Subscription *subscription)
{
	const char *name = text_to_cstring(subscription->name);

	pgstat_report_activity(STATE_RUNNING, psprintf("serving subscription \"%s\"", name));
	set_ps_display(psprintf("subscription %s", name));
}

/*
 * Prepare locks the subscription and looks up what is needed to run it.  Returns NULL
 * if the worker must leave.
 */
static Subscription *
Prepare(const RelayJob *job, EventHandler *handler)
{
	Subscription *subscription = FindSubscription(job);
	Oid owner;

	if (subscription == NULL)
		return NULL;
	owner = get_role_oid(subscription->owner, true);
	if (!OidIsValid(owner))
		(void) LeaveUnfit(job, subscription,
						  psprintf("role \"%s\" does not exist", subscription->owner));
	else if (superuser_arg(owner))
		(void) LeaveUnfit(job, subscription,
						  psprintf("owner \"%s\" is a superuser", subscription->owner));
	else if (owner != GetSessionUserId())
	{
		RelayFound found = {.number = job->number, .owner = owner, .due = true};

		TopicSetFromPatterns(&found.wants, &subscription->topics);
		RegistryMerge(MyDatabaseId, &found, 1, 0);
		LogUnlogged(subscription->name, found.unlogged);
		(void) Leave(RELAY_UNFINISHED);
	}
	else
	{
		ShowJob(subscription);
		EventHandlerFind(subscription, owner, handler);
		return subscription;
	}
	return NULL;
}

/* ----------------------------------------------------------------
 * The step
 * ----------------------------------------------------------------
 */

/*
 * InTransaction does the work of a step, and fills "next" with the batch that is in
 * flight when the step has committed.
 */
static RelayStep
InTransaction(const RelayJob *job, bool last, Batch *next)
{
	EventHandler handler;
	Subscription *subscription = Prepare(job, &handler);
	bool handled = RelayBatchNumber() != 0;

	if (subscription == NULL)
	{
		RelayBatchLeave(job);
		return STEP_LEAVE;
	}

	/* Leave while the database is dropped or copied */
	if (!DatabaseIsOpen(MyDatabaseId))
	{
		/* A copy of the database must not find a batch that seems to have been handled. */
		if (handled)
			DeliveryGiveBack(subscription, RelayBatchNumber(), false);
		return Leave(RELAY_BUSY);
	}

	/* Handle the batch in flight */
	if (!handled)
		RelayBatchRecover(job, subscription);
	else if (!RelayBatchHandle(job, subscription, &handler))
		return Leave(RELAY_GONE);
	if (RelayMustLeave())
		return Leave(RELAY_UNFINISHED);

	/* Fetch the next one */
	RelayBatchFetch(subscription, last, next);

	/*
	 * This server's disk must have the batch in flight before the handler is called, which
	 * might end the server.  If no handler wrote, the commit waits for nothing else.
	 */
	if (next->events != NIL && (!handled || synchronous_commit == SYNCHRONOUS_COMMIT_OFF))
		RelayCommitLocally();
	if (handled || next->events != NIL || next->more)
		return STEP_HANDLED;

	/* Events of other topics that were passed do not keep other subscriptions waiting. */
	return next->wrote && !(last && SchedulerIsCrowded()) ? STEP_HANDLED : STEP_NOTHING;
}

/*
 * AfterError decides what follows an error that EventHandle() has not caught.
 */
static RelayStep
AfterError(const RelayJob *job, const ErrorData *error)
{
	Subscription *subscription;
	RelayStep step;

	if (RelayBatchRolledBack(job, error))
		return STEP_HANDLED;
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED ||
		error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE ||
		ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_TRANSACTION_ROLLBACK)
		return Leave(RELAY_BUSY);

	/* Where the extension is gone, or is an older one, there is no subscription. */
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = OidIsValid(get_extension_oid("idempotency", true)) &&
						   OidIsValid(ExtensionRelationOid("subscription"))
					   ? SubscriptionFindNumber(job->number)
					   : NULL;
	step = subscription != NULL ? LeaveUnfit(job, subscription, text_to_cstring(ErrorAsText(error)))
								: Leave(RELAY_GONE);
	PopActiveSnapshot();
	CommitTransactionCommand();
	return step;
}

/*
 * RelayStepRun runs a step, and sets why the worker leaves, after STEP_LEAVE, and when
 * there is something to do again, after STEP_NOTHING.  No code that runs in the step, its
 * commit included, can change the role.
 */
RelayStep
RelayStepRun(const RelayJob *job, bool last, RelayEnd *end, TimestampTz *nextDue)
{
	volatile RelayStep step = STEP_LEAVE;
	Batch next = {0};
	Oid user;
	int context;

	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		GetUserIdAndSecContext(&user, &context);
		SetUserIdAndSecContext(user, context | SECURITY_LOCAL_USERID_CHANGE);
		MemoryContextSwitchTo(stepContext);
		PushActiveSnapshot(GetTransactionSnapshot());
		step = InTransaction(job, last, &next);
		PopActiveSnapshot();
		RelayBatchBeginCommit();
		InjectionPoint("relay-commit");
		CommitTransactionCommand();
		SetUserIdAndSecContext(user, context);

		/* Record what has committed before a cancel, or SIGTERM, is processed */
		HOLD_INTERRUPTS();
		InjectionPoint("relay-set");
		RelayBatchSet(job, &next);
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
		step = AfterError(job, error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(TopMemoryContext);
	MemoryContextReset(stepContext);
	ForgetSession();
	pgstat_report_stat(false);

	*end = step == STEP_LEAVE ? conclusion : RELAY_UNFINISHED;
	return step;
}
