/*-------------------------------------------------------------------------
 *
 * server/shmem.c
 *	  The shared memory of all parts of the library.
 *
 * Each part registers in _PG_init().  The postmaster allocates the memory at startup,
 * and again after a crash of a backend; then each part initializes its own.  Each part
 * has one LWLock of the tranche "idempotency".  Without preloading, the pointers stay
 * NULL.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"

#include "server/shmem.h"

#define SHARED_NAME "idempotency"
#define PARTS_MOST 8

static SharedPart parts[PARTS_MOST];
static int partCount = 0;

static shmem_request_hook_type previousRequestHook = NULL;
static shmem_startup_hook_type previousStartupHook = NULL;

/*
 * SharedMemoryRegister adds a part; called from _PG_init().
 */
void
SharedMemoryRegister(const SharedPart *part)
{
	Assert(partCount < PARTS_MOST);
	parts[partCount++] = *part;
}

static Size
SharedBytes(void)
{
	Size bytes = 0;

	for (int i = 0; i < partCount; i++)
		bytes = add_size(bytes, MAXALIGN(parts[i].bytes));
	return bytes;
}

static void
RequestSharedMemory(void)
{
	if (previousRequestHook != NULL)
		previousRequestHook();

	RequestAddinShmemSpace(SharedBytes());
	RequestNamedLWLockTranche(SHARED_NAME, partCount);
}

/*
 * StartupSharedMemory sets the pointers of all parts, and initializes the memory unless
 * another process has.
 */
static void
StartupSharedMemory(void)
{
	LWLockPadded *locks;
	char *memory;
	bool found;

	if (previousStartupHook != NULL)
		previousStartupHook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memory = ShmemInitStruct(SHARED_NAME, SharedBytes(), &found);
	locks = GetNamedLWLockTranche(SHARED_NAME);
	if (!found)
		memset(memory, 0, SharedBytes());
	for (int i = 0; i < partCount; i++)
	{
		*parts[i].address = memory;
		if (!found)
			parts[i].init(memory, &locks[i].lock);
		memory += MAXALIGN(parts[i].bytes);
	}
	LWLockRelease(AddinShmemInitLock);
}

/*
 * SharedMemoryInit sets the server's startup hooks, if the library is preloaded; called
 * once per process, from _PG_init().
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
