/*-------------------------------------------------------------------------
 *
 * fingerprint.c
 *	  SHA-256 of a request, and of texts that must not run into one another.
 *
 * What is hashed is UTF-8 whatever the server's encoding, so that a database
 * in LATIN1 and one in UTF8 know a request by the same fingerprint; in
 * SQL_ASCII the bytes are hashed as they are.
 *
 * The fingerprint of one document is the plain SHA-256 of its canonical form,
 * so that a client can compute it with any RFC 8785 library.  A digest of
 * several texts hashes a label that says what it is for, and then the texts:
 * each as a length of four bytes, most significant first, and its bytes; NULL
 * as the length -1.  No two lists of texts have the same encoding, and none
 * begins as JSON does.
 *
 * Nothing here takes a lock or outlives the call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/memutils.h"

#include "canonical.h"
#include "compat.h"
#include "fingerprint.h"

PG_FUNCTION_INFO_V1(idempotency_fingerprint);
PG_FUNCTION_INFO_V1(idempotency_fingerprint_request);

/* What the digest of a request is labelled with; another layout, another label. */
#define REQUEST_LABEL "idempotency request 1"

/*
 * MessageBegin makes an empty message, in the current context.  A message is
 * a bytea in the making: the room for its header comes first.
 */
static void
MessageBegin(StringInfo message)
{
	initStringInfo(message);
	appendStringInfoSpaces(message, VARHDRSZ);
}

/*
 * MessageAddCanonical appends the canonical form of a document in UTF-8.
 * Leaves scratch memory in the current context, as CanonicalAppend does.
 */
static void
MessageAddCanonical(StringInfo message, text *document)
{
	int start = message->len;
	const char *utf8;
	int length;

	CanonicalAppend(message, document);
	utf8 = Utf8OfServerText(message->data + start, message->len - start, &length);
	if (utf8 != message->data + start)
	{
		message->len = start;
		appendBinaryStringInfo(message, utf8, length);
	}
}

/*
 * MessageDigest returns the SHA-256 of a message, palloc'ed in the current
 * context; the message stays its owner's.
 */
static bytea *
MessageDigest(StringInfo message)
{
	SET_VARSIZE(message->data, message->len);
	return DatumGetByteaPP(DirectFunctionCall1(sha256_bytea, PointerGetDatum(message->data)));
}

/*
 * AddLength appends a length in network byte order.
 */
static void
AddLength(StringInfo parts, int32 length)
{
	uint32 bytes = pg_hton32((uint32) length);

	appendBinaryStringInfo(parts, (char *) &bytes, sizeof(bytes));
}

/*
 * PartsBegin starts a digest of several texts, in the current context.
 */
void
PartsBegin(StringInfo parts, const char *label)
{
	MessageBegin(parts);
	AddLength(parts, strlen(label));
	appendStringInfoString(parts, label);
}

/*
 * PartsAdd appends a text to a digest; NULL differs from every text.
 */
void
PartsAdd(StringInfo parts, const text *part)
{
	const char *bytes;
	const char *utf8;
	int length;

	if (part == NULL)
	{
		AddLength(parts, -1);
		return;
	}

	bytes = VARDATA_ANY(part);
	utf8 = Utf8OfServerText(bytes, VARSIZE_ANY_EXHDR(part), &length);
	AddLength(parts, length);
	appendBinaryStringInfo(parts, utf8, length);
	if (utf8 != bytes)
		pfree((char *) utf8);
}

/*
 * PartsDigest returns the digest, 32 bytes palloc'ed in the current context,
 * and frees what was gathered.
 */
bytea *
PartsDigest(StringInfo parts)
{
	bytea *digest = MessageDigest(parts);

	pfree(parts->data);
	return digest;
}

/*
 * FingerprintOfDocument returns the fingerprint of a document, 32 bytes
 * palloc'ed in the current context, and frees its scratch memory.  Throws
 * what CanonicalAppend throws.
 */
bytea *
FingerprintOfDocument(text *document)
{
	MemoryContext scratch = AllocSetContextCreate(CurrentMemoryContext, "idempotency fingerprint",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(scratch);
	StringInfoData message;
	bytea *digest;

	MessageBegin(&message);
	MessageAddCanonical(&message, document);

	MemoryContextSwitchTo(caller);
	digest = MessageDigest(&message);
	MemoryContextDelete(scratch);
	return digest;
}

/*
 * idempotency_fingerprint is fingerprint(document).
 */
Datum
idempotency_fingerprint(PG_FUNCTION_ARGS)
{
	PG_RETURN_BYTEA_P(FingerprintOfDocument(PG_GETARG_TEXT_PP(0)));
}

/*
 * idempotency_fingerprint_request is fingerprint(method, path, body).  A NULL
 * body is a request that has none, unlike one whose body is JSON's null.
 */
Datum
idempotency_fingerprint_request(PG_FUNCTION_ARGS)
{
	StringInfoData parts;
	MemoryContext scratch;
	MemoryContext caller;
	bytea *digest;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		PG_RETURN_NULL();

	scratch = AllocSetContextCreate(CurrentMemoryContext, "idempotency fingerprint",
									ALLOCSET_DEFAULT_SIZES);
	caller = MemoryContextSwitchTo(scratch);
	PartsBegin(&parts, REQUEST_LABEL);
	PartsAdd(&parts, PG_GETARG_TEXT_PP(0));
	PartsAdd(&parts, PG_GETARG_TEXT_PP(1));
	PartsAdd(&parts, PG_ARGISNULL(2) ? NULL : CanonicalOfDocument(PG_GETARG_TEXT_PP(2)));

	MemoryContextSwitchTo(caller);
	digest = PartsDigest(&parts);
	MemoryContextDelete(scratch);
	PG_RETURN_BYTEA_P(digest);
}
