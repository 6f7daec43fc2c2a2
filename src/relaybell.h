/*-------------------------------------------------------------------------
 *
 * relaybell.h
 *	  How a commit that published calls the relay.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYBELL_H
#define IDEMPOTENCY_RELAYBELL_H

#include "topicset.h"

#include "postgres_ext.h"

/* For whoever publishes. */
extern void BellRing(const TopicSet *topics);

/* For the registry, which holds its lock. */
struct RelayDatabase;
extern void BellsInit(struct RelayDatabase *bells);
extern int BellHang(Oid database);
extern void BellTakeDown(Oid database);
extern int BellsCount(void);
extern Oid BellsMost(Oid than, int *more);
extern bool BellAnswer(int place, TopicSet *topics);

/* For a worker that is about to leave. */
extern void BellArm(Oid database, const TopicSet *topics);

#endif /* IDEMPOTENCY_RELAYBELL_H */
