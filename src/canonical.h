/*-------------------------------------------------------------------------
 *
 * canonical.h
 *	  One text for one JSON value.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CANONICAL_H
#define IDEMPOTENCY_CANONICAL_H

#include "lib/stringinfo.h"

extern text *CanonicalOfDocument(text *document);
extern void CanonicalAppend(StringInfo out, text *document);
extern const char *Utf8OfServerText(const char *bytes, int length, int *utf8Length);

#endif /* IDEMPOTENCY_CANONICAL_H */
