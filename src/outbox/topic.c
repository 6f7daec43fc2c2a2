/*-------------------------------------------------------------------------
 *
 * outbox/topic.c
 *	  Topic patterns: "*" matches any characters, dots included, and a backslash
 *	  escapes the next character.
 *
 * In every encoding of a database both are bytes of their own, so texts are compared
 * byte by byte.  But "*" matches whole characters: in some encodings the end of one and
 * the beginning of the next look like a third.
 *
 * Takes no locks, reads no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/name.h"
#include "outbox/topic.h"

/*
 * Matches tells whether the pattern matches the whole topic.  Where the two differ, the
 * last "*" matches one character more.
 */
static bool
Matches(const char *pattern, const char *patternEnd, const char *topic, const char *topicEnd)
{
	const char *star = NULL;
	const char *resume = NULL;

	while (topic < topicEnd)
	{
		bool escaped = pattern < patternEnd && *pattern == '\\';

		if (pattern < patternEnd && *pattern == '*')
		{
			star = ++pattern;
			resume = topic;
		}
		else if (pattern + escaped < patternEnd && pattern[escaped] == *topic)
		{
			pattern += 1 + escaped;
			topic++;
		}
		else if (star != NULL)
		{
			pattern = star;
			resume += Min(pg_encoding_mblen(GetDatabaseEncoding(), resume), topicEnd - resume);
			topic = resume;
		}
		else
			return false;
	}
	while (pattern < patternEnd && *pattern == '*')
		pattern++;
	return pattern == patternEnd;
}

/*
 * TopicMatches tells whether one of the patterns matches the topic.
 */
bool
TopicMatches(const TopicPatterns *patterns, const text *topic)
{
	const char *bytes = VARDATA_ANY(topic);
	const char *end = bytes + VARSIZE_ANY_EXHDR(topic);

	for (int i = 0; i < patterns->count; i++)
	{
		const text *pattern = patterns->patterns[i];
		const char *first = VARDATA_ANY(pattern);

		if (Matches(first, first + VARSIZE_ANY_EXHDR(pattern), bytes, end))
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
 * EndsInBackslash tells whether the last backslash escapes nothing.
 */
static bool
EndsInBackslash(const text *pattern)
{
	const char *bytes = VARDATA_ANY(pattern);
	int count = 0;

	for (int i = VARSIZE_ANY_EXHDR(pattern) - 1; i >= 0 && bytes[i] == '\\'; i--)
		count++;
	return count % 2 == 1;
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
	{
		CheckName(patterns.patterns[i], "topic");
		if (EndsInBackslash(patterns.patterns[i]))
			ErrorBadArgument("pattern of topics ends in a backslash",
							 "A backslash escapes the next character; write two for one.");
	}
}
