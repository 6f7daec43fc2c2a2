/*-------------------------------------------------------------------------
 *
 * base/pattern.h
 *	  Patterns of topics and of scopes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_PATTERN_H
#define IDEMPOTENCY_BASE_PATTERN_H

typedef struct ScopePattern
{
	const text *pattern;
	text *prefix; /* what each match begins with; the only match if there is no "*" */
	bool isExact; /* there is no "*" */
} ScopePattern;

extern bool PatternMatches(const text *pattern, const text *value);
extern void PatternCheck(const text *pattern, const char *what);

#endif /* IDEMPOTENCY_BASE_PATTERN_H */
