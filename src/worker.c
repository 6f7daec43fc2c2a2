/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  What the background workers have in common: signals, settings, the
 *	  connection, sleep.
 *
 * Once it is connected, a worker leaves at its own time after SIGTERM: it looks
 * at ShutdownRequestPending between two steps.  So that it gets there, none of
 * its steps may wait without bound.
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

/*
 * What the configuration, the role or the database may say otherwise, for
 * sessions of clients.  A lock that is not got within a second is left to who
 * holds it.
 */
static const struct
{
	const char *name;
	const char *value;
} settings[] = {
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
};

static emit_log_hook_type previousLogHook = NULL;

/*
 * SoftenRefusal logs as LOG, instead of FATAL, why a worker did not come in:
 * the database was just dropped, or closed, or the worker was told to go.  It
 * tries again, or there is nothing left to try; neither is worth an alarm.
 */
static void
SoftenRefusal(ErrorData *error)
{
	if (error->elevel == FATAL && (error->sqlerrcode == ERRCODE_UNDEFINED_DATABASE ||
								   error->sqlerrcode == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE ||
								   error->sqlerrcode == ERRCODE_ADMIN_SHUTDOWN))
		error->elevel = LOG;
	if (previousLogHook != NULL)
		previousLogHook(error);
}

/*
 * WorkerConnect connects the worker that calls it to a database as the
 * bootstrap superuser, or, if "database" is invalid, to the shared catalogs
 * alone.  Does not return if that is not possible.
 */
void
WorkerConnect(Oid database)
{
	/* While it waits for DROP DATABASE, say, it must go at once. */
	pqsignal(SIGTERM, die);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();

	SetConfigOption("application_name", MyBgworkerEntry->bgw_type, PGC_SUSET, PGC_S_OVERRIDE);
	for (size_t i = 0; i < lengthof(settings); i++)
		SetConfigOption(settings[i].name, settings[i].value, PGC_SUSET, PGC_S_OVERRIDE);

	previousLogHook = emit_log_hook;
	emit_log_hook = SoftenRefusal;
	if (OidIsValid(database))
		BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	else
		BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	emit_log_hook = previousLogHook;

	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
}

/*
 * WorkerSleep sleeps for "ms" milliseconds, or until a signal comes; for ever
 * if that is negative.  Rereads the configuration if it was asked to.
 */
void
WorkerSleep(long ms, uint32 waitEvent)
{
	int events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | (ms >= 0 ? WL_TIMEOUT : 0);

	(void) WaitLatch(MyLatch, events, ms, waitEvent);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
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
