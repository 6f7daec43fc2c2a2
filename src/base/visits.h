/*-------------------------------------------------------------------------
 *
 * base/visits.h
 *	  Requests of sessions that a background worker visit their database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_VISITS_H
#define IDEMPOTENCY_BASE_VISITS_H

#include "nodes/pg_list.h"

#define REAPER_TYPE "idempotency reaper"

extern void RequestVisit(void);
extern List *TakeVisitRequests(void);

/* For _PG_init(). */
extern void VisitRequestsInit(void);

#endif /* IDEMPOTENCY_BASE_VISITS_H */
