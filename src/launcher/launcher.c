/*-------------------------------------------------------------------------
 *
 * launcher/launcher.c
 *	  The background worker that starts all others: one for the server.
 *
 * It runs where the library is preloaded and the server takes writes: on a standby
 * it starts with the promotion.  It is connected to no database, only to the shared
 * catalogs.  One loop makes the cycles of visits (launcher/cycle.c) and starts the
 * relay's workers (launcher/relays.c); neither waits for anything but the latch.
 *
 * It exits with code 1, so that the postmaster starts it again, unless the server is
 * stopped.  The README has what a new launcher finds.
 *
 * Locks: see the two.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/wait_event.h"

#include "base/bgworker.h"
#include "base/compat.h"
#include "launcher/launcher.h"
#include "relay/relay.h"

/* How many seconds pass until a launcher that died is started again. */
#define RESTART_SECONDS 1

/*
 * Detach is called when the launcher exits: its latch must not be set any more.
 */
static void
Detach(int code, Datum arg)
{
	RelayAwake(NULL);
}

/*
 * idempotency_launcher_main is the launcher.
 */
void
idempotency_launcher_main(Datum unused)
{
	MemoryContext each =
		AllocSetContextCreate(TopMemoryContext, "idempotency launcher", ALLOCSET_DEFAULT_SIZES);
	uint32 event;

	WorkerConnect(InvalidOid);
	event = WaitEventExtensionNew("IdempotencyLauncherMain");
	CycleInit();
	before_shmem_exit(Detach, (Datum) 0);
	RelayAwake(MyLatch);

	while (!ShutdownRequestPending)
	{
		long relays;
		long visits;

		MemoryContextSwitchTo(each);
		relays = RelaysRun();
		MemoryContextSwitchTo(each);
		visits = CycleRun();
		MemoryContextReset(each);
		WorkerSleep(WorkerSooner(relays, visits), event);
	}
	proc_exit(1);
}

/*
 * LauncherInit registers the launcher; called from _PG_init().  pg_upgrade needs a server
 * in which no other process works.
 */
void
LauncherInit(void)
{
	CycleShmemInit();
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		WorkerRegister("idempotency launcher", "idempotency_launcher_main", RESTART_SECONDS);
}
