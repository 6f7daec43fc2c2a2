/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *	  Module entry: wiring, and nothing else. docs/internals/architecture.md
 *	  describes the folders.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"

#include "base/guc.h"
#include "base/reevaluation.h"
#include "base/shmem.h"
#include "base/stats.h"
#include "base/wakeup.h"
#include "keys/transaction.h"
#include "launcher/launcher.h"
#include "outbox/outbox.h"
#include "relay/relay.h"

PG_MODULE_MAGIC;

extern PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	DefineSettings();
	ReevaluationInit();
	SharedMemoryInit();
	StatsInit();
	WakeupInit();
	LauncherInit();
	TransactionStateInit();
	EventWakeupInit();
	RelayInit();
}
