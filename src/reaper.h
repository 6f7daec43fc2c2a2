/*-------------------------------------------------------------------------
 *
 * reaper.h
 *	  The reaper: removes what has run out, in a database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPER_H
#define IDEMPOTENCY_REAPER_H

#include "fmgr.h"

/* The background worker that the launcher starts for one database. */
extern PGDLLEXPORT void idempotency_reaper_main(Datum database);

#endif /* IDEMPOTENCY_REAPER_H */
