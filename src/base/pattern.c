/*-------------------------------------------------------------------------
 *
 * base/pattern.c
 *	  Patterns of topics and of scopes: "*" matches any characters, punctuation included,
 *	  and a backslash escapes the next character.
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

#include "fmgr.h"
#include "mb/pg_wchar.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/name.h"
#include "base/pattern.h"

/*
 * Matches tells whether the pattern matches the whole value.  Where the two differ, the
 * last "*" matches one character more.
 */
static bool
Matches(const char *pattern, const char *patternEnd, const char *value, const char *valueEnd)
{
	const char *star = NULL;
	const char *resume = NULL;

	while (value < valueEnd)
	{
		bool escaped = pattern + 1 < patternEnd && *pattern == '\\';

		if (pattern < patternEnd && *pattern == '*')
		{
			star = ++pattern;
			resume = value;
		}
		else if (pattern < patternEnd && pattern[escaped] == *value)
		{
			pattern += 1 + escaped;
			value++;
		}
		else if (star != NULL)
		{
			pattern = star;
			resume += Min(pg_encoding_mblen(GetDatabaseEncoding(), resume), valueEnd - resume);
			value = resume;
		}
		else
			return false;
	}
	while (pattern < patternEnd && *pattern == '*')
		pattern++;
	return pattern == patternEnd;
}

/*
 * PatternMatches tells whether the pattern matches the whole value.
 */
bool
PatternMatches(const text *pattern, const text *value)
{
	const char *first = VARDATA_ANY(pattern);
	const char *bytes = VARDATA_ANY(value);

	return Matches(first, first + VARSIZE_ANY_EXHDR(pattern), bytes,
				   bytes + VARSIZE_ANY_EXHDR(value));
}

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
 * PatternCheck throws IK400 or 22023 unless "pattern" is valid; "what" is scope or topic.
 */
void
PatternCheck(const text *pattern, const char *what)
{
	CheckName(pattern, what);
	if (EndsInBackslash(pattern))
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						errmsg("pattern of %ss ends in a backslash", what),
						errhint("A backslash escapes the next character; write two for one.")));
}
