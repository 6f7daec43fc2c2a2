/*-------------------------------------------------------------------------
 *
 * request/canonical.h
 *	  The canonical text of a JSON document.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_CANONICAL_H
#define IDEMPOTENCY_REQUEST_CANONICAL_H

#include "lib/stringinfo.h"

extern text *CanonicalOfDocument(text *document);
extern void CanonicalAppend(StringInfo out, text *document);
extern const char *Utf8OfServerText(const char *bytes, int length, int *utf8Length);

#endif /* IDEMPOTENCY_REQUEST_CANONICAL_H */
