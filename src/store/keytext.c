/*-------------------------------------------------------------------------
 *
 * store/keytext.c
 *	  The type idempotency.keytext: a key as it is stored.
 *
 * Most keys are UUIDs, whose text takes 36 bytes in the heap and in the index.  One in
 * the canonical form (lower case, with hyphens) is stored as a zero byte, which no text
 * contains, and its 16 bytes; any other key as its text.  Each key has one form, so that
 * bytes are compared; UUIDs of version 7 keep their order.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/uuid.h"

#include "base/compat.h"
#include "store/row.h"

PG_FUNCTION_INFO_V1(idempotency_keytext_in);
PG_FUNCTION_INFO_V1(idempotency_keytext_out);
PG_FUNCTION_INFO_V1(idempotency_keytext_recv);
PG_FUNCTION_INFO_V1(idempotency_keytext_send);

#define UUID_CHARS 36
#define PACKED_BYTES (1 + UUID_LEN)

/*
 * HexValue returns the value of a digit of a canonical UUID, or -1.
 */
static int
HexValue(unsigned char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return -1;
}

/*
 * ParseCanonicalUuid stores the 16 bytes of the UUID in "s".  Returns false unless "s"
 * is in the form that KeyTextUnpack() returns.
 */
static bool
ParseCanonicalUuid(const char *s, unsigned char *bytes)
{
	for (int i = 0, n = 0; i < UUID_CHARS; n++)
	{
		int high, low;

		if ((i == 8 || i == 13 || i == 18 || i == 23) && s[i++] != '-')
			return false;
		high = HexValue(s[i++]);
		low = HexValue(s[i++]);
		if (high < 0 || low < 0)
			return false;
		bytes[n] = high << 4 | low;
	}
	return true;
}

/*
 * KeyTextPack returns the form in which "key" is stored: the key itself, or a packed
 * UUID in the current memory context.
 */
bytea *
KeyTextPack(const text *key)
{
	unsigned char uuid[UUID_LEN];
	bytea *stored;

	if (VARSIZE_ANY_EXHDR(key) != UUID_CHARS || !ParseCanonicalUuid(VARDATA_ANY(key), uuid))
		return unconstify(text *, key);

	stored = palloc(VARHDRSZ + PACKED_BYTES);
	SET_VARSIZE(stored, VARHDRSZ + PACKED_BYTES);
	VARDATA(stored)[0] = '\0';
	memcpy(VARDATA(stored) + 1, uuid, UUID_LEN);
	return stored;
}

/*
 * KeyTextUnpack returns the text of a stored key: itself, or the text of a UUID in the
 * current memory context.
 */
text *
KeyTextUnpack(const bytea *stored)
{
	static const char digits[] = "0123456789abcdef";
	const unsigned char *bytes = (const unsigned char *) VARDATA_ANY(stored);
	text *key;
	char *s;

	if (VARSIZE_ANY_EXHDR(stored) != PACKED_BYTES || bytes[0] != '\0')
		return unconstify(bytea *, stored);

	key = palloc(VARHDRSZ + UUID_CHARS);
	SET_VARSIZE(key, VARHDRSZ + UUID_CHARS);
	s = VARDATA(key);
	for (int n = 1; n <= UUID_LEN; n++)
	{
		*s++ = digits[bytes[n] >> 4];
		*s++ = digits[bytes[n] & 0x0F];
		if (n == 4 || n == 6 || n == 8 || n == 10)
			*s++ = '-';
	}
	return key;
}

/*
 * keytext_in(cstring) RETURNS keytext: accepts every text
 *
 * A claim refuses an invalid key.  If this function did, one such key would fail the
 * COPY of all rows when a dump is restored into another encoding.
 */
Datum
idempotency_keytext_in(PG_FUNCTION_ARGS)
{
	return PointerGetDatum(KeyTextPack(cstring_to_text(PG_GETARG_CSTRING(0))));
}

/*
 * keytext_out(keytext) RETURNS cstring
 */
Datum
idempotency_keytext_out(PG_FUNCTION_ARGS)
{
	PG_RETURN_CSTRING(text_to_cstring(KeyTextUnpack(PG_GETARG_BYTEA_PP(0))));
}

/*
 * keytext_recv(internal) RETURNS keytext: the text, in the client's encoding
 */
Datum
idempotency_keytext_recv(PG_FUNCTION_ARGS)
{
	return PointerGetDatum(KeyTextPack(DatumGetTextPP(textrecv(fcinfo))));
}

/*
 * keytext_send(keytext) RETURNS bytea
 */
Datum
idempotency_keytext_send(PG_FUNCTION_ARGS)
{
	return DirectFunctionCall1(textsend, PointerGetDatum(KeyTextUnpack(PG_GETARG_BYTEA_PP(0))));
}
