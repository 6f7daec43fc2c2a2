/*-------------------------------------------------------------------------
 *
 * outbox/notify.h
 *	  Callbacks by which the relay learns what a transaction publishes, and
 *	  which subscriptions it changes.
 *
 * The relay sets them in _PG_init().  They take effect at commit.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_NOTIFY_H
#define IDEMPOTENCY_OUTBOX_NOTIFY_H

#include "outbox/topic.h"

typedef struct OutboxCallbacks
{
	void (*published)(const text *topic);
	void (*subscribed)(int64 number, Oid owner, const TopicPatterns *patterns);
	void (*unsubscribed)(int64 number); /* also when it loses its handler */
	void (*redriven)(int64 number);
} OutboxCallbacks;

extern OutboxCallbacks OutboxNotify; /* outbox/publish.c */

#endif /* IDEMPOTENCY_OUTBOX_NOTIFY_H */
