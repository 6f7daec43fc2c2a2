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

/* What there is to know before events of the outbox are given out. */
typedef struct ParkedSummary
{
	TimestampTz next; /* when the first is to be given again; 0: none is */
	bool live;		  /* later events may have to wait for some */
	int64 passed;	  /* where the position stood */
	bool behind;	  /* some were in flight below it */
	int64 *ahead;	  /* the numbers of those above it, in order */
	int aheadCount;
} ParkedSummary;

/* The parked events of a batch, as OF_BATCH selects them with ParkedBatchValues().
 * The numbers come with their bounds: a plan without them may read all dead letters. */
#define OF_BATCH " WHERE subscription" EQ "$1 AND seq" EQ "ANY ($3) AND seq" GE "$4 AND seq" LE "$5"

/* parked.c */
extern void ParkedSummarize(const text *subscription, const OutboxCursor *cursor,
							ParkedSummary *summary);
extern List *ParkedDue(const text *subscription, TimestampTz now, int max, int64 batch);
extern List *ParkedInBatch(const text *subscription, const Position *position);
extern void ParkedBatchValues(const text *subscription, const Position *position, Datum *values);
extern bool ParkedHasError(const text *subscription, const List *events, const text *error);
extern bool ParkedHas(const text *subscription, const ParkedSummary *summary, int64 seq);
extern bool ParkedBlocks(const text *subscription, const ParkedSummary *summary,
						 const Event *event);

/* parkedwrite.c */
extern void ParkedWait(const text *subscription, const Event *event);
extern void ParkedAgain(const text *subscription, const Event *event, TimestampTz retryAt);
extern void ParkedHeadsOnly(const text *subscription, TimestampTz retryAt);
extern void ParkedFail(const text *subscription, const Event *event, const text *error,
					   TimestampTz retryAt);
extern void ParkedHoldFollowers(const text *subscription, const Event *event);
extern void ParkedLetGo(const text *subscription, const text *aggregate);
extern void ParkedDone(const text *subscription, const Position *position);
extern int64 ParkedRedrive(const text *subscription, const pg_uuid_t *id);
extern void ParkedDelete(const text *subscription);

#endif /* IDEMPOTENCY_PARKED_H */
