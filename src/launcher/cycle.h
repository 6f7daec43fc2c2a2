/*-------------------------------------------------------------------------
 *
 * launcher/cycle.h
 *	  The cycles in which the launcher visits the databases.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_CYCLE_H
#define IDEMPOTENCY_LAUNCHER_CYCLE_H

/* What the worker of a visit is started with. */
typedef struct VisitJob
{
	Oid database;
	bool reap;	  /* survey only, if not */
	bool refused; /* the last visit ended in VISIT_REFUSED, and the log says so */
} VisitJob;

/* How a visit ended. */
typedef enum VisitResult
{
	VISIT_FAILED, /* it did not report: it got no connection, or died of an error */
	VISIT_NOT_INSTALLED,
	VISIT_REFUSED,	  /* the tables are not as this library knows them */
	VISIT_UNFINISHED, /* there is more to do at once */
	VISIT_ENDED
} VisitResult;

/* For the launcher. */
extern void CycleInit(void);
extern long CycleRun(void);

/* For _PG_init(). */
extern void CycleShmemInit(void);

/* For the worker of a visit. */
extern void CycleReport(Oid database, VisitResult result);

#endif /* IDEMPOTENCY_LAUNCHER_CYCLE_H */
