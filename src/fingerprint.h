/*-------------------------------------------------------------------------
 *
 * fingerprint.h
 *	  Digests of requests, and of texts that must not run into one another.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_FINGERPRINT_H
#define IDEMPOTENCY_FINGERPRINT_H

#include "lib/stringinfo.h"

extern bytea *FingerprintOfDocument(text *document);

/* A digest of several texts: begin, add each of them, take the digest. */
extern void PartsBegin(StringInfo parts, const char *label);
extern void PartsAdd(StringInfo parts, const text *part);
extern bytea *PartsDigest(StringInfo parts);

#endif /* IDEMPOTENCY_FINGERPRINT_H */
