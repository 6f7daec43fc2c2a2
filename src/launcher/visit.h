/*-------------------------------------------------------------------------
 *
 * launcher/visit.h
 *	  The worker of a visit to a database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_VISIT_H
#define IDEMPOTENCY_LAUNCHER_VISIT_H

#include "fmgr.h"

/* The background worker that the launcher starts for one database. */
extern PGDLLEXPORT void idempotency_reaper_main(Datum unused);

#endif /* IDEMPOTENCY_LAUNCHER_VISIT_H */
