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

/*
 * After how many milliseconds a worker that got no slot is tried again.  The end of a
 * worker of another extension does not set the latch.
 */
#define SLOT_MS 500

/* What the worker of a visit is started with. */
typedef struct VisitJob
{
	Oid database;
	bool reap;
	bool survey;
	bool prompt;  /* a session has requested it; it reports nothing */
	bool refused; /* the last visit ended in VISIT_REFUSED, and the log says so */
} VisitJob;

/* How a visit ended. */
typedef enum VisitResult
{
	VISIT_FAILED, /* it did not report: it got no connection, or died of an error */
	VISIT_NOT_INSTALLED,
	VISIT_REFUSED,	  /* the tables are not as this library knows them */
	VISIT_UNFINISHED, /* there is more to do at once */
	VISIT_EMPTY,	  /* there was nothing to remove */
	VISIT_ENDED
} VisitResult;

/* launcher.c: for _PG_init(), and for the postmaster */
extern void LauncherInit(void);
extern PGDLLEXPORT void idempotency_launcher_main(Datum unused);

/* cycle.c: the cycles in which the launcher visits the databases */
extern void CycleShmemInit(void);
extern void CycleInit(void);
extern long CycleRun(void);
extern void CycleReport(Oid database, VisitResult result);

/* visit.c: the background worker that the launcher starts for a visit */
extern PGDLLEXPORT void idempotency_reaper_main(Datum unused);

#endif /* IDEMPOTENCY_LAUNCHER_LAUNCHER_H */
