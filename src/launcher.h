/*-------------------------------------------------------------------------
 *
 * launcher.h
 *	  The background worker that sends the reaper to every database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_H
#define IDEMPOTENCY_LAUNCHER_H

#include "fmgr.h"
#include "nodes/pg_list.h"

/* What came of a worker's visit to a database. */
typedef enum VisitResult
{
	VISIT_FAILED, /* it did not say: it got no connection, or died of an error */
	VISIT_NOT_INSTALLED,
	VISIT_REFUSED,	  /* the tables are not as this library knows them */
	VISIT_UNFINISHED, /* there is more to do at once */
	VISIT_ENDED
} VisitResult;

/* For sessions. */
extern void LauncherCall(void);

/* For the worker. */
extern void LauncherReport(Oid database, VisitResult result);
extern bool LauncherKnowsRefusal(void);
extern bool LauncherWantsReaping(void);

/* For databases.c. */
extern List *LauncherTakeCalls(void);

/* For _PG_init(), and for the postmaster. */
extern void LauncherInit(void);
extern PGDLLEXPORT void idempotency_launcher_main(Datum unused);

#endif /* IDEMPOTENCY_LAUNCHER_H */
