/*-------------------------------------------------------------------------
 *
 * parked.h
 *	  Events that failed: to be given again, waiting behind one, or dead.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_PARKED_H
#define IDEMPOTENCY_PARKED_H

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

#include "event.h"
#include "position.h"

/* What there is to know before a fetch. */
typedef struct ParkedSummary
{
	TimestampTz next; /* when the first is to be given again; 0: none is */
	bool any;		  /* there are some that later events may wait for, or whose */
					  /* numbers are behind the cursor */
} ParkedSummary;

extern void ParkedSummarize(const text *subscription, int64 safe, ParkedSummary *summary);
extern List *ParkedDue(const text *subscription, TimestampTz now, int max, int64 batch);
extern List *ParkedInBatch(const text *subscription, const Position *position);
extern bool ParkedHas(const text *subscription, const Event *event, bool *blocked);

extern void ParkedWait(const text *subscription, const Event *event);
extern void ParkedFail(const text *subscription, const Event *event, const text *error,
					   TimestampTz retryAt);
extern void ParkedHoldFollowers(const text *subscription, const Event *event);
extern void ParkedLetGo(const text *subscription, const text *aggregate);
extern void ParkedDone(const text *subscription, const Position *position);
extern int64 ParkedRedrive(const text *subscription, const pg_uuid_t *id);
extern void ParkedDelete(const text *subscription);

#endif /* IDEMPOTENCY_PARKED_H */
