/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *	  Module entry: wiring, and nothing else.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"

#include "guc.h"
#include "launcher.h"
#include "owntable.h"
#include "relaylauncher.h"
#include "shmem.h"
#include "stats.h"
#include "xact.h"

PG_MODULE_MAGIC;

extern PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	DefineSettings();
	SharedMemoryInit();
	StatsInit();
	LauncherInit();
	RelayLauncherInit();
	OwnTableInit();
	TransactionStateInit();
}
