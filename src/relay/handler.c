/*-------------------------------------------------------------------------
 *
 * relay/handler.c
 *	  Calling the handler of a subscription with one event.
 *
 * Each call runs in a subtransaction, so that an error undoes only what the handler wrote.
 * Deferred triggers and constraints and the check of open claims run before the end of the
 * subtransaction, so that their errors belong to the event.
 *
 * The handler has the rights of the subscription's owner, the worker's login role.  It
 * runs as a SECURITY DEFINER function does, where the server refuses SET ROLE and SET
 * SESSION AUTHORIZATION.  The owner of its function can replace the body at any time, so
 * that role must be able to act as the subscription's owner: EventHandlerFind() checks
 * that, once a transaction.
 *
 * Settings, temporary tables, cursors, prepared statements and what require_claim() knows of
 * claims end with the event; session locks and the values of sequences, with the transaction.  A
 * handler that exceeds idempotency.handler_timeout is cancelled, and its worker terminated
 * GRACE_MS later.
 *
 * Locks: those of the handler, until the transaction ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/prepare.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timeout.h"
#include "utils/varlena.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/name.h"
#include "base/subtransaction.h"
#include "keys/transaction.h"
#include "relay/relay.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_check_handler);

/* How long a handler that was cancelled can continue, in milliseconds. */
#define GRACE_MS 5000

/* How much of an error is kept, in bytes. */
#define ERROR_BYTES 8192

static TimeoutId graceTimeout = MAX_TIMEOUTS;
static ProcessUtility_hook_type previousHook = NULL;

/*
 * EventType returns the OID of idempotency.event.  Throws 55000 if there is none.
 */
static Oid
EventType(void)
{
	Oid schema = get_namespace_oid("idempotency", true);
	Oid type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("event"),
							   ObjectIdGetDatum(schema));

	if (!OidIsValid(type))
		ErrorNotInstalled();
	return type;
}

/*
 * HandlerOid returns the function of a stored handler, schema.function(...), that takes one
 * event, or InvalidOid if it no longer exists.  Needs no right to the schema, as a call of a
 * function by its OID needs none.
 */
static Oid
HandlerOid(const char *handler)
{
	char *name = pstrdup(handler);
	char *arguments = strrchr(name, '(');
	Oid eventType = EventType();
	List *names;

	if (arguments == NULL)
		return InvalidOid;
	*arguments = '\0';
	names = stringToQualifiedNameListCompat(name);
	if (list_length(names) != 2)
		return InvalidOid;
	return GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
						   CStringGetDatum(strVal(lsecond(names))),
						   PointerGetDatum(buildoidvector(&eventType, 1)),
						   ObjectIdGetDatum(get_namespace_oid(strVal(linitial(names)), true)));
}

/*
 * CheckHandlerOwner throws 42501 unless the owner of a handler's function, which can
 * replace its body, can act as the owner of the subscription anyway.
 */
static void
CheckHandlerOwner(Oid handler, Oid functionOwner, Oid owner)
{
	if (has_privs_of_role(functionOwner, owner) || member_can_set_role(functionOwner, owner))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("owner \"%s\" of handler %s does not have the privileges of role \"%s\"",
					GetUserNameFromId(functionOwner, false), format_procedure_qualified(handler),
					GetUserNameFromId(owner, false)),
			 errdetail("The owner of a function can replace its body at any time, and the handler "
					   "runs with the privileges of the subscription's owner."),
			 errhint("Use ALTER FUNCTION ... OWNER TO to make the subscription's owner the owner "
					 "of the handler.")));
}

/*
 * EventHandlerFind looks up the handler of a subscription, which runs as "owner", in the
 * current memory context.  Throws 42883 if it does not exist, 42P13 unless it returns void, and
 * 42501 unless the owner can execute it and the function's owner has the privileges of that owner.
 */
void
EventHandlerFind(const char *handler, Oid owner, EventHandler *found)
{
	Oid function = HandlerOid(handler);

	found->owner = owner;
	if (!CallableFind(function, &found->callable))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION), errmsg("handler %s does not exist", handler),
				 errhint("Create it again, or pass another one to "
						 "idempotency.alter_subscription().")));
	if (found->callable.result != VOIDOID)
		ereport(ERROR, (errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
						errmsg("function %s cannot handle events", handler),
						errhint("A handler takes one idempotency.event and returns void.")));
	CallablePermit(function, owner);
	CheckHandlerOwner(function, found->callable.owner, owner);
	fmgr_info(function, &found->function);
}

/*
 * OwnerProblem returns why no worker can call a handler as a role in a database, in the current
 * memory context, or NULL.
 */
char *
OwnerProblem(Oid owner, Oid database)
{
	HeapTuple tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(owner));
	char *problem = NULL;
	Form_pg_authid role;

	if (!HeapTupleIsValid(tuple))
		return psprintf("role with OID %u does not exist", owner);

	role = (Form_pg_authid) GETSTRUCT(tuple);
	if (role->rolsuper)
		problem = psprintf("owner \"%s\" is a superuser", NameStr(role->rolname));
#ifndef SERVER_CONNECTS_WITHOUT_LOGIN
	else if (!role->rolcanlogin)
		problem = psprintf("role \"%s\" is not permitted to log in", NameStr(role->rolname));
#endif
	else if (database_aclcheck(database, owner, ACL_CONNECT) != ACLCHECK_OK)
		problem = psprintf("role \"%s\" has no CONNECT privilege on the database",
						   NameStr(role->rolname));
	ReleaseSysCache(tuple);
	return problem;
}

/*
 * CheckStaysInPrefix throws 42501 if the login role has a scope prefix and the handler of
 * the subscription would run as another role, whose worker has the settings of its own login.
 */
static void
CheckStaysInPrefix(Oid owner)
{
	const char *prefix = ScopePrefix();

	if (prefix[0] == '\0' || owner == GetAuthenticatedUserId())
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("role \"%s\" cannot own the handler's subscription",
					GetUserNameFromId(owner, false)),
			 errdetail("The handler would run without the scope prefix \"%s\" of role \"%s\".",
					   prefix, GetUserNameFromId(GetAuthenticatedUserId(), false)),
			 errhint("Subscribe as the login role and leave out the owner, or let a role without a "
					 "scope prefix subscribe.")));
}

/*
 * check_handler(handler, owner): workers can call the handler for a subscription of the owner, and
 * the caller may let them.  Throws 42501, and what EventHandlerFind() throws.
 */
Datum
idempotency_check_handler(PG_FUNCTION_ARGS)
{
	const char *name = NameStr(*PG_GETARG_NAME(1));
	Oid owner = get_role_oid(name, false);
	const char *problem = OwnerProblem(owner, MyDatabaseId);
	EventHandler handler;

	CheckStaysInPrefix(owner);
	if (problem != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("role \"%s\" cannot own a subscription with a handler", name),
				 errdetail("Workers cannot call the handler: %s.", problem),
				 errhint("Pass an owner that is no superuser, has LOGIN, and may connect to the "
						 "database; it needs no password.")));
	EventHandlerFind(text_to_cstring(PG_GETARG_TEXT_PP(0)), owner, &handler);
	PG_RETURN_VOID();
}

/*
 * SetConstraintsRefused throws for SET CONSTRAINTS.  Its effect would last until the end
 * of the transaction, which many events share, and the server can undo it only by a
 * rollback.
 */
static void
SetConstraintsRefused(PlannedStmt *statement, const char *source, bool readOnlyTree,
					  ProcessUtilityContext context, ParamListInfo parameters,
					  QueryEnvironment *environment, DestReceiver *receiver,
					  QueryCompletion *completion)
{
	ProcessUtility_hook_type next = previousHook != NULL ? previousHook : standard_ProcessUtility;

	if (IsA(statement->utilityStmt, ConstraintsSetStmt))
		ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						errmsg("SET CONSTRAINTS is not supported in the handler of a subscription"),
						errhint("Declare the constraint as INITIALLY IMMEDIATE or INITIALLY "
								"DEFERRED instead.")));
	next(statement, source, readOnlyTree, context, parameters, environment, receiver, completion);
}

/*
 * RefuseSetConstraints makes SET CONSTRAINTS fail from now on; called once, by a worker.
 */
void
RefuseSetConstraints(void)
{
	previousHook = ProcessUtility_hook;
	ProcessUtility_hook = SetConstraintsRefused;
}

/*
 * GraceIsOver ends the worker as SIGTERM does; but the event counts as failed.  Runs in a
 * signal handler.
 */
static void
GraceIsOver(void)
{
	die(SIGNAL_FROM_HERE(SIGTERM));
}

static void
StartTimeouts(void)
{
	int most = SettingNumber(&HandlerTimeoutSetting, NULL);

	if (most == 0)
		return;
	if (graceTimeout == MAX_TIMEOUTS)
		graceTimeout = RegisterTimeout(USER_TIMEOUT, GraceIsOver);
	enable_timeout_after(STATEMENT_TIMEOUT, most);
	enable_timeout_after(graceTimeout, (int) Min((int64) most + GRACE_MS, PG_INT32_MAX));
}

/*
 * StopTimeouts disables the timeouts, and forgets a cancel that came too late for the
 * event: it is not meant for what follows.
 */
static void
StopTimeouts(void)
{
	disable_timeout(STATEMENT_TIMEOUT, false);
	if (graceTimeout != MAX_TIMEOUTS)
		disable_timeout(graceTimeout, false);
	QueryCancelPending = false;
}

typedef struct EventCall
{
	EventHandler *handler;
	Datum event;
} EventCall;

/*
 * CallAndCheck calls the handler as its owner, and does then what a transaction does
 * before it commits.
 */
static void
CallAndCheck(void *argument)
{
	const EventCall *call = argument;
	bool isnull = false;
	Oid caller;
	int context;

	GetUserIdAndSecContext(&caller, &context);
	SetUserIdAndSecContext(call->handler->owner, context | SECURITY_LOCAL_USERID_CHANGE);
	PushActiveSnapshot(GetTransactionSnapshot());
	SetCurrentStatementStartTimestamp();
	StartTimeouts();

	InjectionPoint("event-call");
	(void) CallableCall(&call->handler->function, call->event, &isnull);
	InjectionPoint("event-check");
	AfterTriggerFireDeferred();
	CheckMayCommit(false);
	PortalHashTableDeleteAll();
	ResetTempTableNamespace();

	StopTimeouts();
	PopActiveSnapshot();
	SetUserIdAndSecContext(caller, context);
	InjectionPoint("event-keep");
}

/*
 * ErrorAsText returns what is kept of an error: the SQLSTATE, the message, and
 * the detail, in the current memory context.
 */
char *
ErrorAsText(const ErrorData *error)
{
	StringInfoData out;

	initStringInfo(&out);
	appendStringInfo(&out, "%s: %s", unpack_sql_state(error->sqlerrcode),
					 error->message != NULL ? error->message : "missing error text");
	if (error->detail != NULL)
		appendStringInfo(&out, "\nDETAIL:  %s", error->detail);
	out.data[pg_mbcliplen(out.data, out.len, ERROR_BYTES)] = '\0';
	return out.data;
}

/*
 * EventHandle calls the handler with an event.  Returns whether that succeeded; if not,
 * the call has left nothing but "error" and its code, in the current memory context.  The caller
 * checks TransactionMustAbort() then, and whether the handler was replaced.
 */
bool
EventHandle(EventHandler *handler, Datum event, char **error, int *sqlstate)
{
	MemoryContext callerContext = CurrentMemoryContext;
	MemoryContext callContext =
		AllocSetContextCreate(callerContext, "idempotency event", ALLOCSET_DEFAULT_SIZES);
	EventCall call = {handler, event};
	int nest = NewGUCNestLevel();
	ErrorData *caught;

	/* A rollback could not bring back the triggers that the call fires of other events */
	AfterTriggerFireDeferred();

	MemoryContextSwitchTo(callContext);
	caught = SubtransactionRun(CallAndCheck, &call);
	if (caught != NULL)
		StopTimeouts();
	DropAllPreparedStatements();
	ScopeForgetResults();
	AtEOXact_GUC(false, nest);

	MemoryContextSwitchTo(callerContext);
	*error = caught == NULL ? NULL : ErrorAsText(caught);
	*sqlstate = caught == NULL ? 0 : caught->sqlerrcode;
	MemoryContextDelete(callContext);
	return caught == NULL;
}

/*
 * ForgetSession forgets what handlers have left in the session beyond their events.
 * Called between two transactions.
 */
void
ForgetSession(void)
{
	LockReleaseAll(USER_LOCKMETHOD, true);
	ResetSequenceCaches();
}
