/*-------------------------------------------------------------------------
 *
 * request/fingerprint.c
 *	  SHA-256 of a request, and of lists of texts.
 *
 * The hashed text is UTF-8 in every database encoding but SQL_ASCII, so that databases
 * of different encodings compute the same fingerprint.
 *
 * The fingerprint of one document is the SHA-256 of its canonical form, which a client
 * can compute with any RFC 8785 library.  The digest of a list hashes a label that names
 * its purpose, and then the texts, each as its length (four bytes, most significant
 * first; NULL is -1) and its bytes, so that no two lists have the same encoding.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "libpq/pqformat.h"

#include "base/compat.h"
#include "base/digest.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_fingerprint);
PG_FUNCTION_INFO_V1(idempotency_fingerprint_request);

/* The label of a request; another layout needs another label. */
#define REQUEST_LABEL "idempotency request 1"

/*
 * Digest returns the SHA-256 of "length" bytes, palloc'ed in the current context.
 */
static bytea *
Digest(const char *bytes, int length)
{
	bytea *digest = palloc(VARHDRSZ + PG_SHA256_DIGEST_LENGTH);

	SET_VARSIZE(digest, VARHDRSZ + PG_SHA256_DIGEST_LENGTH);
	DigestCompute(bytes, length, (uint8 *) VARDATA(digest));
	return digest;
}

/*
 * PartsBegin begins the digest of a list of texts, in the current context.
 */
void
PartsBegin(StringInfo parts, const char *label)
{
	initStringInfo(parts);
	pq_sendint32(parts, strlen(label));
	appendStringInfoString(parts, label);
}

/*
 * PartsAdd appends a text; NULL differs from every text.
 */
void
PartsAdd(StringInfo parts, const text *part)
{
	const char *bytes;
	const char *utf8;
	int length;

	if (part == NULL)
	{
		pq_sendint32(parts, -1);
		return;
	}

	bytes = VARDATA_ANY(part);
	utf8 = Utf8OfServerText(bytes, VARSIZE_ANY_EXHDR(part), &length);
	pq_sendint32(parts, length);
	appendBinaryStringInfo(parts, utf8, length);
	if (utf8 != bytes)
		pfree((char *) utf8);
}

/*
 * PartsDigest returns the digest, 32 bytes palloc'ed in the current context, and frees the
 * list.
 */
bytea *
PartsDigest(StringInfo parts)
{
	bytea *digest = Digest(parts->data, parts->len);

	pfree(parts->data);
	return digest;
}

/*
 * FingerprintOfDocument returns the fingerprint of a document, 32 bytes palloc'ed in the
 * current context.  Throws what CanonicalAppend() throws.
 */
bytea *
FingerprintOfDocument(Document *document)
{
	StringInfoData canonical;
	const char *utf8;
	int length;

	initStringInfo(&canonical);
	CanonicalAppend(&canonical, document);
	utf8 = Utf8OfServerText(canonical.data, canonical.len, &length);
	return Digest(utf8, length);
}

/*
 * fingerprint(document) RETURNS bytea
 */
Datum
idempotency_fingerprint(PG_FUNCTION_ARGS)
{
	PG_RETURN_BYTEA_P(FingerprintOfDocument(DocumentFromArg(fcinfo, 0)));
}

/*
 * idempotency_fingerprint_request is fingerprint(method, path, body).  A NULL body is a
 * request without one, and differs from JSON's null.
 */
Datum
idempotency_fingerprint_request(PG_FUNCTION_ARGS)
{
	StringInfoData parts;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		PG_RETURN_NULL();

	PartsBegin(&parts, REQUEST_LABEL);
	PartsAdd(&parts, PG_GETARG_TEXT_PP(0));
	PartsAdd(&parts, PG_GETARG_TEXT_PP(1));
	PartsAdd(&parts, PG_ARGISNULL(2) ? NULL : CanonicalOfDocument(DocumentFromArg(fcinfo, 2)));
	PG_RETURN_BYTEA_P(PartsDigest(&parts));
}
