/*-------------------------------------------------------------------------
 *
 * launcher/launcher.h
 *	  The background worker that starts all others.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_LAUNCHER_H
#define IDEMPOTENCY_LAUNCHER_LAUNCHER_H

#include "fmgr.h"

/* For _PG_init(), and for the postmaster. */
extern void LauncherInit(void);
extern PGDLLEXPORT void idempotency_launcher_main(Datum unused);

#endif /* IDEMPOTENCY_LAUNCHER_LAUNCHER_H */
