/*-------------------------------------------------------------------------
 *
 * outbox/wakeup.h
 *	  Waking consumers that wait for events.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_WAKEUP_H
#define IDEMPOTENCY_OUTBOX_WAKEUP_H

#include "outbox/topic.h"

/* Called after the commit of a transaction that has published; NULL: nothing. */
extern void (*EventPublishedHook)(const TopicSet *topics);

extern void EventPublished(const text *topic);

/* For _PG_init(). */
extern void EventWakeupInit(void);

#endif /* IDEMPOTENCY_OUTBOX_WAKEUP_H */
