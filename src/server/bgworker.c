/*-------------------------------------------------------------------------
 *
 * server/bgworker.c
 *	  What the background workers have in common: start, signals, settings,
 *	  connection, sleep.
 *
 * Once connected, a worker that runs our code only exits at a time of its own after
 * SIGTERM: it checks ShutdownRequestPending between two steps, none of which may wait
 * without bound.  A worker that runs the code of users is ended by SIGTERM as a session
 * is.
 *
 * Locks: none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include "server/bgworker.h"

typedef struct OwnSetting
{
	const char *name;
	const char *value;
} OwnSetting;

/*
 * Settings that the configuration, the role or the database may have changed for the
 * sessions of clients.
 */
static const OwnSetting ownSettings[] = {
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
 * Settings that delivery needs, where a worker runs the code of a user, whose other
 * settings apply.  A transaction of the worker is many of the user's.
 */
static const OwnSetting usersSettings[] = {
	{"role", "none"},
	{"default_transaction_isolation", "read committed"},
	{"default_transaction_read_only", "off"},
#ifdef SERVER_LIMITS_TRANSACTIONS
	{"transaction_timeout", "0"},
#endif
	{NULL, NULL},
};

/* The types of workers that got no slot since the last WorkerSleep(), each of them once. */
static char missed[2 * BGW_MAXLEN] = "";

static emit_log_hook_type previousLogHook = NULL;
static WorkerRefusal *onRefusal = NULL;

/*
 * Describe fills what all workers of ours have in common.
 */
static void
Describe(BackgroundWorker *worker, const char *type, const char *function)
{
	memset(worker, 0, sizeof(BackgroundWorker));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker->bgw_start_time = BgWorkerStart_RecoveryFinished;
	strlcpy(worker->bgw_name, type, BGW_MAXLEN);
	strlcpy(worker->bgw_type, type, BGW_MAXLEN);
	strlcpy(worker->bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker->bgw_function_name, function, BGW_MAXLEN);
}

/*
 * WorkerRegister registers a worker that the postmaster starts with the server, and again
 * when it has exited; for _PG_init().
 */
void
WorkerRegister(const char *type, const char *function, int restartSeconds)
{
	BackgroundWorker worker;

	Describe(&worker, type, function);
	worker.bgw_restart_time = restartSeconds;
	RegisterBackgroundWorker(&worker);
}

/*
 * WorkerStart starts a worker for a database, which gets "job" in bgw_extra.  It wakes the
 * caller when it starts and ends.  Returns its handle, in TopMemoryContext, or NULL if
 * there is no slot, which the log says once.
 */
BackgroundWorkerHandle *
WorkerStart(WorkerKind *kind, Oid database, const void *job, Size bytes)
{
	MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);
	BackgroundWorkerHandle *handle = NULL;
	BackgroundWorker worker;

	Describe(&worker, kind->type, kind->function);
	snprintf(worker.bgw_name, BGW_MAXLEN, "%s for database %u", kind->type, database);
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_notify_pid = MyProcPid;
	memcpy(worker.bgw_extra, job, bytes);
	if (!RegisterDynamicBackgroundWorker(&worker, &handle) && !kind->slotMissed)
		ereport(LOG, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					  errmsg("no background worker slot is free for the %s", kind->type),
					  errhint("%s Consider increasing max_worker_processes.", kind->waits)));
	kind->slotMissed = handle == NULL;
	if (handle == NULL && strstr(missed, kind->type) == NULL)
		snprintf(missed + strlen(missed), sizeof(missed) - strlen(missed), "%s%s",
				 missed[0] == '\0' ? "" : ", ", kind->type);
	MemoryContextSwitchTo(caller);
	return handle;
}

/*
 * WorkerHasEnded tells whether a worker has ended, or was never started.
 */
bool
WorkerHasEnded(BackgroundWorkerHandle *handle)
{
	pid_t pid;

	return GetBackgroundWorkerPid(handle, &pid) == BGWH_STOPPED;
}

/*
 * IsSoft tells whether a FATAL error needs no attention: the database was just dropped,
 * or closed, or the worker got SIGTERM.  The launcher tries again, if there is
 * anything to try.
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
 * SoftenRefusal logs as LOG, instead of FATAL, why a worker could not connect, or must
 * exit.  A caller of WorkerConnectAs() may do so for other reasons as well.
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

static void
Connect(Oid database, Oid role, const OwnSetting *setting)
{
	/* A connection that waits, for DROP DATABASE for example, must end at once */
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
 * which may change what the log gets, is called with the error.  SIGTERM ends the worker at
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
 * if that is negative.  Rereads the configuration if it was asked to.  Meanwhile,
 * pg_stat_activity shows which workers got no slot since the last call.
 */
void
WorkerSleep(long ms, uint32 waitEvent)
{
	static char shown[sizeof(missed)] = "";
	int events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | (ms >= 0 ? WL_TIMEOUT : 0);

	if (strcmp(missed, shown) != 0)
		pgstat_report_activity(
			missed[0] == '\0' ? STATE_IDLE : STATE_RUNNING,
			missed[0] == '\0' ? ""
							  : psprintf("no background worker slot is free for the %s", missed));
	strlcpy(shown, missed, sizeof(shown));
	missed[0] = '\0';
	(void) WaitLatch(MyLatch, events, ms, waitEvent);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	WorkerReload();
}

/*
 * WorkerReload rereads the configuration if it was asked to.
 */
void
WorkerReload(void)
{
	if (!ConfigReloadPending)
		return;
	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
}

/*
 * WorkerSooner returns the shorter of two times to sleep; -1 is for ever.
 */
long
WorkerSooner(long a, long b)
{
	return a < 0 || (b >= 0 && b < a) ? b : a;
}
