/*-------------------------------------------------------------------------
 *
 * outbox/topic.h
 *	  Patterns of topics.
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

#endif /* IDEMPOTENCY_OUTBOX_TOPIC_H */
