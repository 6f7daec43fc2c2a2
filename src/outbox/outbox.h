/*-------------------------------------------------------------------------
 *
 * outbox/outbox.h
 *	  Publishing, and waking those that wait for events.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_OUTBOX_H
#define IDEMPOTENCY_OUTBOX_OUTBOX_H

#include "utils/array.h"

/* topic.c: sets of topics as bits */

/* The number of bits of a set; a power of two. */
#define TOPIC_BITS 1024
#define TOPIC_WORDS (TOPIC_BITS / 64)

typedef struct TopicSet
{
	uint64 words[TOPIC_WORDS];
} TopicSet;

extern void TopicSetAddTopic(TopicSet *set, const text *topic);
extern void TopicSetFromPatterns(TopicSet *set, ArrayType *patterns);
extern bool TopicSetsMeet(const TopicSet *a, const TopicSet *b);

/* wakeup.c: waking consumers that wait for events */

/* Called after the commit of a transaction that has published; NULL: nothing. */
extern void (*EventPublishedHook)(const TopicSet *topics);

extern void EventPublished(const text *topic);

/* For _PG_init(). */
extern void EventWakeupInit(void);

#endif /* IDEMPOTENCY_OUTBOX_OUTBOX_H */
