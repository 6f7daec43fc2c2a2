/*-------------------------------------------------------------------------
 *
 * outbox/topic.c
 *	  Lists of patterns of topics (base/pattern.c).
 *
 * Takes no locks, reads no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/array.h"

#include "base/errors.h"
#include "base/pattern.h"
#include "outbox/topic.h"

/*
 * TopicMatches tells whether one of the patterns matches the topic.
 */
bool
TopicMatches(const TopicPatterns *patterns, const text *topic)
{
	for (int i = 0; i < patterns->count; i++)
	{
		if (PatternMatches(patterns->patterns[i], topic))
			return true;
	}
	return false;
}

/*
 * TopicPatternsFromArray fills "patterns" from a text[], in the current memory context.
 * Skips NULLs.
 */
void
TopicPatternsFromArray(TopicPatterns *patterns, ArrayType *array)
{
	Datum *values;
	bool *nulls;
	int count;

	deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT, &values, &nulls, &count);
	patterns->patterns = palloc(Max(1, count) * sizeof(text *));
	patterns->count = 0;
	for (int i = 0; i < count; i++)
	{
		if (!nulls[i])
			patterns->patterns[patterns->count++] = DatumGetTextPP(values[i]);
	}
}

/*
 * TopicPatternsCheck throws 22023 or IK400 unless the argument of a caller is a valid
 * list of patterns.
 */
void
TopicPatternsCheck(ArrayType *array)
{
	TopicPatterns patterns;

	if (ARR_NDIM(array) != 1 || array_contains_nulls(array))
		ErrorBadArgument("topics must be a list of patterns",
						 "Pass at least one, such as ARRAY['order.*'], and no NULL.");
	TopicPatternsFromArray(&patterns, array);
	for (int i = 0; i < patterns.count; i++)
		PatternCheck(patterns.patterns[i], "topic");
}
