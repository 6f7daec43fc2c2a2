/*-------------------------------------------------------------------------
 *
 * outbox/wakeup.h
 *	  Waking consumers that wait for events.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_WAKEUP_H
#define IDEMPOTENCY_OUTBOX_WAKEUP_H

extern void EventPublished(const text *topic);

/* For _PG_init(). */
extern void EventWakeupInit(void);

#endif /* IDEMPOTENCY_OUTBOX_WAKEUP_H */
