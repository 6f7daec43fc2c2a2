/*-------------------------------------------------------------------------
 *
 * relaybell.h
 *	  How a commit that published calls the relay.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYBELL_H
#define IDEMPOTENCY_RELAYBELL_H

#include "postgres_ext.h"

/* For whoever publishes. */
extern void BellRing(void);

/* For the registry, which holds its lock. */
extern int BellHang(Oid database);
extern void BellTakeDown(Oid database);
extern bool BellAnswer(int place);

/* For a worker that is about to leave. */
extern void BellArm(Oid database);

#endif /* IDEMPOTENCY_RELAYBELL_H */
