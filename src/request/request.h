/*-------------------------------------------------------------------------
 *
 * request/request.h
 *	  Canonical JSON, digests, HTTP, and key generation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_REQUEST_H
#define IDEMPOTENCY_REQUEST_REQUEST_H

#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/jsonb.h"
#include "utils/numeric.h"
#include "utils/uuid.h"

/* document.c: the type idempotency.document */
typedef struct varlena Document;
extern Document *DocumentFromArg(FunctionCallInfo fcinfo, int arg);
extern text *DocumentText(Document *document);
extern JsonbContainer *DocumentRoot(Document *document);

/* canonical.c, number.c */
extern text *CanonicalOfDocument(Document *document);
extern void CanonicalAppend(StringInfo out, Document *document);
extern const char *Utf8OfServerText(const char *bytes, int length, int *utf8Length);
extern void NumberAppend(StringInfo out, Numeric number);

/* fingerprint.c: the digest of a document, and of a list of texts */
extern bytea *FingerprintOfDocument(Document *document);
extern void PartsBegin(StringInfo parts, const char *label);
extern void PartsAdd(StringInfo parts, const text *part);
extern bytea *PartsDigest(StringInfo parts);

/* http.c: problem details (RFC 9457) */
#define PROBLEM_RETRY_AFTER 1 /* seconds, where the end of the operation is unknown */
extern text *ProblemDocument(int status, const char *title, const char *detail);
extern text *ProblemBody(int sqlstate);
extern text *ProblemHeaders(int sqlstate, int retryAfter);

/* keygen.c */
extern pg_uuid_t *NewUuidV7(void);

#endif /* IDEMPOTENCY_REQUEST_REQUEST_H */
