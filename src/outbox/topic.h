/*-------------------------------------------------------------------------
 *
 * outbox/topic.h
 *	  Sets of topics as bits.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_TOPIC_H
#define IDEMPOTENCY_OUTBOX_TOPIC_H

#include "utils/array.h"

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

#endif /* IDEMPOTENCY_OUTBOX_TOPIC_H */
