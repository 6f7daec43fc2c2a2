/*-------------------------------------------------------------------------
 *
 * relay/wakeup.h
 *	  Changes and published events that a commit passes to the relay.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_WAKEUP_H
#define IDEMPOTENCY_RELAY_WAKEUP_H

#include "relay/registry.h"

/* For the scheduler, which holds the registry's lock. */
extern void RelayWakeupArm(RelayDatabase *database, const TopicSet *topics);
extern bool RelayWakeupTake(RelayDatabase *database, TopicSet *topics);

extern bool RelayHasChanges(void);

/* For _PG_init(). */
extern void RelayWakeupInit(void);

#endif /* IDEMPOTENCY_RELAY_WAKEUP_H */
