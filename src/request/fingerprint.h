/*-------------------------------------------------------------------------
 *
 * request/fingerprint.h
 *	  Digests of requests, and of lists of texts.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_FINGERPRINT_H
#define IDEMPOTENCY_REQUEST_FINGERPRINT_H

#include "lib/stringinfo.h"

extern bytea *FingerprintOfDocument(text *document);

/* The digest of a list of texts. */
extern void PartsBegin(StringInfo parts, const char *label);
extern void PartsAdd(StringInfo parts, const text *part);
extern bytea *PartsDigest(StringInfo parts);

#endif /* IDEMPOTENCY_REQUEST_FINGERPRINT_H */
