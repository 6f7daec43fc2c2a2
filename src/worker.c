/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  What the background workers have in common: signals, settings, the
 *	  connection, sleep.
 *
 * Once it is connected, a worker of our own leaves at its own time after SIGTERM:
 * it looks at ShutdownRequestPending between two steps.  So that it gets there,
 * none of its steps may wait without bound.  One that runs the code of a user, who
 * may do so, is ended by SIGTERM as a session is.
 *
 * Locks: none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"

#include "compat.h"
#include "worker.h"

typedef struct Setting
{
	const char *name;
	const char *value;
} Setting;

/*
 * What the configuration, the role or the database may say otherwise, for
 * sessions of clients.  A lock that is not got within a second is left to who
 * holds it.
 */
static const Setting ownSettings[] = {
	{"search_path", "pg_catalog, pg_temp"},
	{"default_transaction_isolation", "read committed"},
	{"default_transaction_read_only", "off"},
	{"default_transaction_deferrable", "off"},
	{"statement_timeout", "0"},
	{"lock_timeout", "1s"},
	{"idle_in_transaction_session_timeout", "0"},
#ifdef SERVER_LIMITS_TRANSACTIONS
	{"transaction_timeout", "0"},
#endif
	{"synchronous_commit", "off"},
	{"zero_damaged_pages", "off"},
	{NULL, NULL},
};

/*
 * What delivery needs, where a worker runs the code of a user; anything else is
 * as the user has it.  A transaction of ours is many of his.
 */
static const Setting usersSettings[] = {
	{"role", "none"},
	{"default_transaction_isolation", "read committed"},
	{"default_transaction_read_only", "off"},
#ifdef SERVER_LIMITS_TRANSACTIONS
	{"transaction_timeout", "0"},
#endif
	{NULL, NULL},
};

static emit_log_hook_type previousLogHook = NULL;
static WorkerRefusal *onRefusal = NULL;

/*
 * IsSoft tells whether a FATAL error is none to alarm anybody: the database was
 * just dropped, or closed, or the worker was told to go.  It tries again, or there
 * is nothing left to try.
 */
static bool
IsSoft(const ErrorData *error)
{
	return error->elevel == FATAL &&
		   (error->sqlerrcode == ERRCODE_UNDEFINED_DATABASE ||
			error->sqlerrcode == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE ||
			error->sqlerrcode == ERRCODE_ADMIN_SHUTDOWN);
}

/*
 * SoftenRefusal logs as LOG, instead of FATAL, why a worker did not come in, or
 * must go.  Whoever connects as a role may say so of other reasons as well.
 */
static void
SoftenRefusal(ErrorData *error)
{
	if (IsSoft(error))
		error->elevel = LOG;
	else if (error->elevel == FATAL && onRefusal != NULL)
		onRefusal(error);
	if (previousLogHook != NULL)
		previousLogHook(error);
}

/*
 * Connect connects the worker that calls it, under the settings.
 */
static void
Connect(Oid database, Oid role, const Setting *setting)
{
	/* While it waits for DROP DATABASE, say, it must go at once. */
	pqsignal(SIGTERM, die);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();

	SetConfigOption("application_name", MyBgworkerEntry->bgw_type, PGC_SUSET, PGC_S_OVERRIDE);
	for (; setting->name != NULL; setting++)
		SetConfigOption(setting->name, setting->value, PGC_SUSET, PGC_S_OVERRIDE);

	previousLogHook = emit_log_hook;
	emit_log_hook = SoftenRefusal;
	if (OidIsValid(database))
		BackgroundWorkerInitializeConnectionByOid(
			database, role, OidIsValid(role) ? BGWORKER_BYPASS_ROLELOGINCHECK : 0);
	else
		BackgroundWorkerInitializeConnection(NULL, NULL, 0);
}

/*
 * WorkerConnect connects the worker that calls it to a database as the
 * bootstrap superuser, or, if "database" is invalid, to the shared catalogs
 * alone.  Does not return if that is not possible.
 */
void
WorkerConnect(Oid database)
{
	Connect(database, InvalidOid, ownSettings);
	emit_log_hook = previousLogHook;
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
}

/*
 * WorkerConnectAs connects the worker that calls it to a database as a role,
 * whose settings apply.  Does not return if that is not possible; then "refusal",
 * which may change what the log gets, is told why.  SIGTERM ends the worker at
 * once, and the log has no alarm of it.
 */
void
WorkerConnectAs(Oid database, Oid role, WorkerRefusal *refusal)
{
	onRefusal = refusal;
	Connect(database, role, usersSettings);
	onRefusal = NULL;
}

/*
 * WorkerSleep sleeps for "ms" milliseconds, or until a signal comes; for ever
 * if that is negative.  Rereads the configuration if it was asked to, and returns
 * whether it has.
 */
bool
WorkerSleep(long ms, uint32 waitEvent)
{
	int events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | (ms >= 0 ? WL_TIMEOUT : 0);

	(void) WaitLatch(MyLatch, events, ms, waitEvent);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	return WorkerReload();
}

/*
 * WorkerReload rereads the configuration if it was asked to, and returns whether
 * it has.
 */
bool
WorkerReload(void)
{
	if (!ConfigReloadPending)
		return false;
	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
	return true;
}

/*
 * WorkerElapsed returns how many milliseconds have passed, by a clock that
 * nobody sets.
 */
long
WorkerElapsed(instr_time since)
{
	instr_time now;

	INSTR_TIME_SET_CURRENT(now);
	INSTR_TIME_SUBTRACT(now, since);
	return (long) INSTR_TIME_GET_MILLISEC(now);
}
