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

#include "keys/transaction.h"
#include "keys/wakeup.h"
#include "launcher/launcher.h"
#include "outbox/outbox.h"
#include "query/reevaluation.h"
#include "relay/relay.h"
#include "server/shmem.h"
#include "server/stats.h"
#include "settings/guc.h"

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
