/*-------------------------------------------------------------------------
 *
 * relaylauncher.h
 *	  The background worker that sends workers to the subscriptions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYLAUNCHER_H
#define IDEMPOTENCY_RELAYLAUNCHER_H

#include "fmgr.h"

/* For _PG_init(), and for the postmaster. */
extern void RelayLauncherInit(void);
extern PGDLLEXPORT void idempotency_relay_launcher_main(Datum unused);

#endif /* IDEMPOTENCY_RELAYLAUNCHER_H */
