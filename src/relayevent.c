/*-------------------------------------------------------------------------
 *
 * relayevent.c
 *	  One event, given to the handler of a subscription.
 *
 * Each call runs in a subtransaction, so that an error takes back what the
 * handler wrote and nothing else.  Everything that would otherwise wait for the
 * end of the transaction happens before that of the subtransaction, so that it is
 * the right event's error: deferred triggers and constraints, and the guard of
 * open claims.
 *
 * The handler has the rights of the subscription's owner, as whom the worker is
 * connected, and can get no other role's: it runs as a SECURITY DEFINER function
 * does, in which the server refuses SET ROLE and SET SESSION AUTHORIZATION.  None of
 * its code runs later: the end of the transaction finds no trigger and no cursor.
 * The owner of its function, who can replace its body at any time, must be able to act
 * as the subscription's owner: that is checked when the handler is looked up, which is
 * once a transaction, and whenever it has been replaced since.
 *
 * What it leaves in the session does not get into the next event: settings,
 * temporary tables, cursors and prepared statements go with the event; session locks
 * and the values of sequences, with the transaction.
 *
 * A handler that takes longer than idempotency.handler_timeout is cancelled, which
 * is its error.  If it goes on nevertheless, its worker is ended GRACE_MS later.
 *
 * Locks: what the handler takes, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "commands/prepare.h"
#include "commands/sequence.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timeout.h"

#include "compat.h"
#include "deferred.h"
#include "errors.h"
#include "guc.h"
#include "outboxerrors.h"
#include "relayevent.h"
#include "xact.h"

/* How long a handler that was cancelled may go on, in milliseconds. */
#define GRACE_MS 5000

/* How much of an error is kept, in bytes. */
#define ERROR_BYTES 8192

static TimeoutId graceTimeout = MAX_TIMEOUTS;

/* ----------------------------------------------------------------
 * The handler
 * ----------------------------------------------------------------
 */

/*
 * EventHandlerFind looks up the handler of a subscription, which is to run as
 * "owner", in the current memory context.  Throws 42883, 42P13, 42501 and 42804.
 * The definition is noted first: if it is still the same at the call, it is the one
 * that was checked.
 */
void
EventHandlerFind(const Subscription *subscription, Oid owner, EventHandler *handler)
{
	Oid function = EventHandlerOid(subscription->handler);
	HeapTuple definition = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));

	if (!HeapTupleIsValid(definition))
		ErrorEventHandlerMissing(subscription->handler);
	handler->definer = HeapTupleHeaderGetRawXmin(definition->t_data);
	handler->definition = definition->t_self;
	ReleaseSysCache(definition);
	EventHandlerCheck(function, owner);
	EventTypeCheck();
	InvokeFunctionExecuteHook(function);
	fmgr_info(function, &handler->function);
	handler->owner = owner;
}

/*
 * EventHandlerReplaced tells whether somebody has replaced the handler since it was
 * looked up, "now" being what is found by its name.  What a handler does to itself is its
 * own affair.
 */
bool
EventHandlerReplaced(EventHandler *handler, EventHandler *now)
{
	return handler->function.fn_oid != now->function.fn_oid ||
		   ((handler->definer != now->definer ||
			 !ItemPointerEquals(&handler->definition, &now->definition)) &&
			!TransactionIdIsCurrentTransactionId(now->definer));
}

/*
 * CheckTrust throws 42501 if the handler was replaced since it was looked up, and by now
 * a role owns it that may not decide what runs here.  A handler that is gone is
 * left to the call.
 */
static void
CheckTrust(EventHandler *handler)
{
	Oid function = handler->function.fn_oid;
	HeapTuple definition;
	Oid functionOwner;
	bool same;

	AcceptInvalidationMessages();
	definition = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	if (!HeapTupleIsValid(definition))
		return;
	same = handler->definer == HeapTupleHeaderGetRawXmin(definition->t_data) &&
		   ItemPointerEquals(&handler->definition, &definition->t_self);
	functionOwner = ((Form_pg_proc) GETSTRUCT(definition))->proowner;
	ReleaseSysCache(definition);
	if (!same && !EventHandlerIsTrusted(functionOwner, handler->owner))
		ErrorEventHandlerOwner(function, functionOwner, handler->owner);
}

/*
 * GraceIsOver ends the worker.  Runs in a signal handler.
 */
static void
GraceIsOver(void)
{
	kill(MyProcPid, SIGTERM);
}

static void
StartTimeouts(void)
{
	if (HandlerTimeout == 0)
		return;
	if (graceTimeout == MAX_TIMEOUTS)
		graceTimeout = RegisterTimeout(USER_TIMEOUT, GraceIsOver);
	enable_timeout_after(STATEMENT_TIMEOUT, HandlerTimeout);
	enable_timeout_after(graceTimeout, (int) Min((int64) HandlerTimeout + GRACE_MS, PG_INT32_MAX));
}

/*
 * StopTimeouts disarms the timeouts; a cancel that nobody has served came too
 * late for the event, and is not meant for what follows.
 */
static void
StopTimeouts(void)
{
	disable_timeout(STATEMENT_TIMEOUT, false);
	if (graceTimeout != MAX_TIMEOUTS)
		disable_timeout(graceTimeout, false);
	QueryCancelPending = false;
}

/*
 * Call calls the handler, as its owner.  A language finds the body in the same cache as
 * CheckTrust(), which nothing brings up to date between the two; unless the function has
 * settings of its own, whose check may.  So what ran is checked once more afterwards.
 */
static void
Call(EventHandler *handler, const Event *event)
{
	LOCAL_FCINFO(call, 1);
	PgStat_FunctionCallUsage usage;

	InitFunctionCallInfoData(*call, &handler->function, 1, InvalidOid, NULL, NULL);
	call->args[0].value = EventDatum(event);
	call->args[0].isnull = false;
	pgstat_init_function_usage(call, &usage);
	CheckTrust(handler);
	(void) FunctionCallInvoke(call);
	CheckTrust(handler);
	pgstat_end_function_usage(&usage, true);
}

/*
 * CallAndCheck calls the handler, and does then what a transaction does before
 * it commits.
 */
static void
CallAndCheck(EventHandler *handler, const Event *event)
{
	Oid caller;
	int context;

	GetUserIdAndSecContext(&caller, &context);
	SetUserIdAndSecContext(handler->owner, context | SECURITY_LOCAL_USERID_CHANGE);
	PushActiveSnapshot(GetTransactionSnapshot());
	SetCurrentStatementStartTimestamp();
	StartTimeouts();

	InjectionPoint("event-call");
	Call(handler, event);
	InjectionPoint("event-check");
	DeferredEnd();
	CheckClaims();
	PortalHashTableDeleteAll();
	ResetTempTableNamespace();

	StopTimeouts();
	PopActiveSnapshot();
	SetUserIdAndSecContext(caller, context);
}

/* ----------------------------------------------------------------
 * Errors
 * ----------------------------------------------------------------
 */

/*
 * ErrorAsText returns what is kept of an error: the SQLSTATE, the message, and
 * the detail, in the current memory context.
 */
text *
ErrorAsText(const ErrorData *error)
{
	StringInfoData out;

	initStringInfo(&out);
	appendStringInfo(&out, "%s: %s", unpack_sql_state(error->sqlerrcode),
					 error->message != NULL ? error->message : "missing error text");
	if (error->detail != NULL)
		appendStringInfo(&out, "\nDETAIL:  %s", error->detail);
	return cstring_to_text_with_len(out.data, pg_mbcliplen(out.data, out.len, ERROR_BYTES));
}

/* ----------------------------------------------------------------
 * One event
 * ----------------------------------------------------------------
 */

/*
 * EventHandle gives an event to the handler.  Returns whether it took it; if
 * not, nothing is left of the call but "error", in the current memory context.
 * The caller asks TransactionIsDoomed() then, and whether the handler is still
 * what it was.
 */
bool
EventHandle(EventHandler *handler, const Event *event, text **error)
{
	MemoryContext callerContext = CurrentMemoryContext;
	ResourceOwner callerOwner = CurrentResourceOwner;
	MemoryContext callContext =
		AllocSetContextCreate(callerContext, "idempotency event", ALLOCSET_DEFAULT_SIZES);
	int nest = NewGUCNestLevel();
	ErrorData *volatile caught = NULL;

	DeferredBegin();
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(callContext);
	PG_TRY();
	{
		CallAndCheck(handler, event);
		InjectionPoint("event-keep");
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		StopTimeouts();
		MemoryContextSwitchTo(callContext);
		caught = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	CurrentResourceOwner = callerOwner;
	DropAllPreparedStatements();
	AtEOXact_GUC(false, nest);

	MemoryContextSwitchTo(callerContext);
	*error = caught == NULL ? NULL : ErrorAsText(caught);
	MemoryContextDelete(callContext);
	return caught == NULL;
}

/*
 * ForgetSession forgets what handlers have left in the session beyond their events.
 * For between two transactions.
 */
void
ForgetSession(void)
{
	LockReleaseAll(USER_LOCKMETHOD, true);
	ResetSequenceCaches();
}
