/*-------------------------------------------------------------------------
 *
 * outbox/topic.h
 *	  Patterns of topics, and sets of topics as bits.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_TOPIC_H
#define IDEMPOTENCY_OUTBOX_TOPIC_H

#include "utils/array.h"

typedef struct TopicPatterns
{
	int count;
	text **patterns;
} TopicPatterns;

extern void TopicPatternsFromArray(TopicPatterns *patterns, ArrayType *array);
extern void TopicPatternsCheck(ArrayType *array);
extern bool TopicMatches(const TopicPatterns *patterns, const text *topic);

/* The number of bits of a set; a power of two. */
#define TOPIC_BITS 1024
#define TOPIC_WORDS (TOPIC_BITS / 64)

typedef struct TopicSet
{
	uint64 words[TOPIC_WORDS];
} TopicSet;

/* topicset.c */
extern void TopicSetAddTopic(TopicSet *set, const text *topic);
extern void TopicSetFromPatterns(TopicSet *set, const TopicPatterns *patterns);
extern bool TopicSetsMeet(const TopicSet *a, const TopicSet *b);
extern bool TopicSetAddAll(TopicSet *set, const TopicSet *more);

#endif /* IDEMPOTENCY_OUTBOX_TOPIC_H */
