/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  Everything the library keeps in shared memory: one structure, which is
 *	  there if the library is in shared_preload_libraries.
 *
 * The postmaster asks for the memory and fills it at startup, and again after
 * a crash of a backend, when all of it begins anew.  Its children find the
 * pointer set: by fork, or, where there is none, by the same hooks.  Without
 * preloading the pointer is NULL, and every room that uses it says what it does
 * then.
 *
 * Locks: AddinShmemInitLock while the structure is made.  The locks in the
 * structure are of one tranche, which pg_stat_activity shows as
 * "idempotency".
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"

#include "relayregistry.h"
#include "shmem.h"

/* The locks of the tranche, by their places. */
typedef enum SharedLock
{
	STATS_LOCK,
	LAUNCHER_LOCK,
	RELAY_LOCK,
	SHARED_LOCKS
} SharedLock;

#define SHARED_NAME "idempotency"

SharedState *Shared = NULL;

static shmem_request_hook_type previousRequestHook = NULL;
static shmem_startup_hook_type previousStartupHook = NULL;

/*
 * SharedBytes returns how much memory the structure takes, with the places of the
 * registry behind it.
 */
static Size
SharedBytes(void)
{
	return add_size(MAXALIGN(sizeof(SharedState)), RegistryBytes());
}

/*
 * RequestSharedMemory tells the postmaster how much memory and how many locks
 * we need.
 */
static void
RequestSharedMemory(void)
{
	if (previousRequestHook != NULL)
		previousRequestHook();

	RequestAddinShmemSpace(SharedBytes());
	RequestNamedLWLockTranche(SHARED_NAME, SHARED_LOCKS);
}

/*
 * InitializeShared fills the structure: nothing counted, nobody waiting,
 * nobody visited, no subscription known.  The pointers to locks hold in every process.
 */
static void
InitializeShared(SharedState *state)
{
	LWLockPadded *locks = GetNamedLWLockTranche(SHARED_NAME);

	memset(state, 0, sizeof(SharedState));

	state->stats.lock = &locks[STATS_LOCK].lock;
	StatsStateInit(&state->stats);

	state->launcher.lock = &locks[LAUNCHER_LOCK].lock;

	state->relay.lock = &locks[RELAY_LOCK].lock;
	RegistryInit(&state->relay, (char *) state + MAXALIGN(sizeof(SharedState)));

	for (int i = 0; i < WAKEUP_VARIABLES; i++)
		ConditionVariableInit(&state->wakeup[i]);
}

/*
 * StartupSharedMemory makes the structure, or finds it where another process
 * has made it.
 */
static void
StartupSharedMemory(void)
{
	bool found;

	if (previousStartupHook != NULL)
		previousStartupHook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	Shared = ShmemInitStruct(SHARED_NAME, SharedBytes(), &found);
	if (!found)
		InitializeShared(Shared);
	LWLockRelease(AddinShmemInitLock);
}

/*
 * SharedMemoryInit hooks us into the server's startup, if we are in time for
 * it; called once per process, from _PG_init().
 */
void
SharedMemoryInit(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;

	previousRequestHook = shmem_request_hook;
	shmem_request_hook = RequestSharedMemory;
	previousStartupHook = shmem_startup_hook;
	shmem_startup_hook = StartupSharedMemory;
}
