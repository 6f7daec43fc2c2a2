/*-------------------------------------------------------------------------
 *
 * outbox/topicset.h
 *	  Sets of topics, and of those that patterns match, as bits.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_TOPICSET_H
#define IDEMPOTENCY_OUTBOX_TOPICSET_H

#include "outbox/topic.h"

/* The number of bits of a set; a power of two. */
#define TOPIC_BITS 1024
#define TOPIC_WORDS (TOPIC_BITS / 64)

typedef struct TopicSet
{
	uint64 words[TOPIC_WORDS];
} TopicSet;

extern void TopicSetAddTopic(TopicSet *set, const text *topic);
extern void TopicSetFromPatterns(TopicSet *set, const TopicPatterns *patterns);
extern bool TopicSetsMeet(const TopicSet *a, const TopicSet *b);
extern bool TopicSetAddAll(TopicSet *set, const TopicSet *more);

#endif /* IDEMPOTENCY_OUTBOX_TOPICSET_H */
