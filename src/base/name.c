/*-------------------------------------------------------------------------
 *
 * base/name.c
 *	  Checking the scope and the key that callers pass.
 *
 * Only arguments are checked, never rows: a dump of another encoding or version must be
 * restored completely.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "base/errors.h"
#include "base/name.h"

PG_FUNCTION_INFO_V1(idempotency_check_name);

/*
 * HasC1Bytes tells whether the bytes 80 to 9F are C1 controls in the database's encoding:
 * they are in the ISO 8859 family, whose text becomes U+0080 to U+009F in UTF-8.
 * Other encodings have printable characters there.
 */
static bool
HasC1Bytes(void)
{
	const char *encoding = GetDatabaseEncodingName();

	return strncmp(encoding, "LATIN", 5) == 0 || strncmp(encoding, "ISO_8859_", 9) == 0;
}

/*
 * ControlCharacterAt returns the position (from 1) of the first control character in
 * "s", or 0.  C1 controls count in UTF-8 and ISO 8859.
 */
static int
ControlCharacterAt(const char *s, int bytes)
{
	bool utf8 = GetDatabaseEncoding() == PG_UTF8;
	bool c1Bytes = !utf8 && HasC1Bytes();

	for (int i = 0; i < bytes; i++)
	{
		unsigned char c = s[i];
		bool c1 = (utf8 && c == 0xC2 && i + 1 < bytes && (unsigned char) s[i + 1] < 0xA0) ||
				  (c1Bytes && c >= 0x80 && c < 0xA0);

		if (c < 0x20 || c == 0x7F || c1)
			return pg_mbstrlen_with_len(s, i) + 1;
	}
	return 0;
}

/*
 * IsUuidInBraces tells whether "value", which begins with a brace, is a UUID as some systems
 * print it, such as {8e03978e-40d5-43dd-bc93-6894a57f9324}.
 */
static bool
IsUuidInBraces(const char *value, int bytes)
{
	return bytes == 38 && value[9] == '-' && strspn(value + 1, "0123456789abcdefABCDEF-") == 36;
}

/*
 * IsJsonObject tells whether "value", which begins with a brace, is the JSON of an object
 * with members, which differ for each operation: {"id": 1}.
 */
static bool
IsJsonObject(const char *value, int bytes)
{
	int i = 1 + strspn(value + 1, " ");

	if (value[i++] != '"')
		return false;
	while (i < bytes && value[i] != '"')
		i += value[i] == '\\' ? 2 : 1;
	if (i >= bytes)
		return false;
	i++;
	return value[i + strspn(value + i, " ")] == ':';
}

/*
 * IsArray tells whether "value" is the text of an array, or another text whose first brace
 * is closed by its last character, such as the unexpanded template {{id}}.
 */
static bool
IsArray(const char *value, int bytes)
{
	bool quoted = false;
	int depth = 0;

	for (int i = 0; i < bytes; i++)
	{
		if (value[i] == '\\')
			i++;
		else if (value[i] == '"')
			quoted = !quoted;
		else if (!quoted && value[i] == '{')
			depth++;
		else if (!quoted && value[i] == '}' && --depth == 0)
			return i == bytes - 1 && !IsUuidInBraces(value, bytes) && !IsJsonObject(value, bytes);
	}
	return false;
}

/*
 * RefuseObjectText throws IK400 if "value" is the text that drivers make of an object, {} or
 * JavaScript's [object Object]: it is the same for each operation, and the first operation
 * would answer for all of them.  A key can be no array either: its elements would count
 * as one message.
 */
void
RefuseObjectText(const text *value, const char *what)
{
	int bytes = VARSIZE_ANY_EXHDR(value);
	bool isKey;
	char *s;

	if (bytes == 0 || strchr("{[", *VARDATA_ANY(value)) == NULL)
		return;
	isKey = strcmp(what, "key") == 0;
	s = text_to_cstring(value);
	if (strcmp(s, "{}") == 0 || (isKey && IsArray(s, bytes)) ||
		(strncmp(s, "[object ", strlen("[object ")) == 0 && s[bytes - 1] == ']'))
		ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
						errmsg("idempotency %s is an array or an object", what),
						errdetail("Drivers pass an array or an object as its text."),
						isKey ? errhint("Pass the key as text, or pass an array to "
										"idempotency.once_many().")
							  : errhint("Pass the %s as text.", what)));
	pfree(s);
}

/*
 * CheckName throws IK400 unless "value" is a valid name of 1 to 255 characters without
 * control characters, and of a scalar; "what" is scope, key, topic or subscription.
 */
void
CheckName(const text *value, const char *what)
{
	const char *s = VARDATA_ANY(value);
	int bytes = VARSIZE_ANY_EXHDR(value);
	int position;

	if (bytes == 0)
		ErrorNameMissing(what);

	/* Most names need no count: a character has at least one byte */
	if (bytes > KEYNAME_MAX_CHARS)
	{
		int chars = pg_mbstrlen_with_len(s, bytes);

		if (chars > KEYNAME_MAX_CHARS)
			ErrorNameTooLong(what, chars);
	}
	RefuseObjectText(value, what);

	/* The message does not contain the name, which would garble the log */
	position = ControlCharacterAt(s, bytes);
	if (position > 0)
		ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
						errmsg("idempotency %s contains a control character", what),
						errdetail("It is at character %d.", position),
						errhint("Reject the client's request.")));
}

/*
 * NameFromArg returns the name that argument "arg" passes.  Throws IK400.
 */
text *
NameFromArg(FunctionCallInfo fcinfo, int arg, const char *what)
{
	text *name;

	if (PG_ARGISNULL(arg))
		ErrorNameMissing(what);
	name = PG_GETARG_TEXT_PP(arg);
	CheckName(name, what);
	return name;
}

/*
 * check_name(what, name): throws IK400 unless the name is valid; for functions in SQL.
 */
Datum
idempotency_check_name(PG_FUNCTION_ARGS)
{
	const char *what = PG_ARGISNULL(0) ? "name" : text_to_cstring(PG_GETARG_TEXT_PP(0));

	(void) NameFromArg(fcinfo, 1, what);
	PG_RETURN_VOID();
}

/*
 * TextCopy returns a copy of "t", which may be NULL, in the current memory context.
 */
text *
TextCopy(const text *t)
{
	return t == NULL ? NULL : memcpy(palloc(VARSIZE_ANY(t)), t, VARSIZE_ANY(t));
}

/*
 * TextEquals compares two texts byte by byte, as COLLATE "C" does.
 */
bool
TextEquals(const text *a, const text *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		   memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

bool
KeyNameEquals(const KeyName *a, const KeyName *b)
{
	return TextEquals(a->key, b->key) && TextEquals(a->scope, b->scope);
}
