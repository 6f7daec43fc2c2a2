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

#include <ctype.h>

#include "fmgr.h"
#include "mb/pg_wchar.h"

#include "base/errors.h"
#include "base/name.h"

/*
 * HasC1Bytes tells whether the bytes 80 to 9F are C1 controls in a single-byte encoding:
 * they are in the ISO 8859 family, whose text becomes U+0080 to U+009F in UTF-8.
 * Other encodings have printable characters there.
 */
static bool
HasC1Bytes(int encoding)
{
	switch (encoding)
	{
		case PG_LATIN1:
		case PG_LATIN2:
		case PG_LATIN3:
		case PG_LATIN4:
		case PG_LATIN5:
		case PG_LATIN6:
		case PG_LATIN7:
		case PG_LATIN8:
		case PG_LATIN9:
		case PG_LATIN10:
		case PG_ISO_8859_5:
		case PG_ISO_8859_6:
		case PG_ISO_8859_7:
		case PG_ISO_8859_8:
			return true;
		default:
			return false;
	}
}

/*
 * ControlCharacterAt returns the position (from 1) of the first control character in
 * "s", or 0.  C1 controls count in UTF-8 and ISO 8859.
 */
static int
ControlCharacterAt(const char *s, int bytes)
{
	bool utf8 = GetDatabaseEncoding() == PG_UTF8;
	bool c1Bytes = HasC1Bytes(GetDatabaseEncoding());

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
 * CheckName throws IK400 unless "value" is a valid name of 1 to 255 characters without
 * control characters; "what" is scope, key, topic or subscription.
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

	/* The message does not contain the name, which would garble the log */
	position = ControlCharacterAt(s, bytes);
	if (position > 0)
		ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
						errmsg("idempotency %s contains a control character", what),
						errdetail("It is at character %d.", position),
						errhint("Reject the client's request.")));
}

/*
 * IsUuidInBraces tells whether "key" is a UUID as some systems print it, such as
 * {8e03978e-40d5-43dd-bc93-6894a57f9324}.
 */
static bool
IsUuidInBraces(const text *key)
{
	static const char form[] = "{xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx}";
	const char *s = VARDATA_ANY(key);

	if (VARSIZE_ANY_EXHDR(key) != sizeof(form) - 1)
		return false;
	for (size_t i = 0; i < sizeof(form) - 1; i++)
	{
		if (form[i] == 'x' ? !isxdigit((unsigned char) s[i]) : s[i] != form[i])
			return false;
	}
	return true;
}

/*
 * IsNotScalar tells whether "key" is the text that drivers make of an array or an object:
 * {a,b} or {}, the JSON of an object, or JavaScript's [object Object].  An unexpanded
 * template, such as {{id}}, is one too.
 */
static bool
IsNotScalar(const text *key)
{
	static const char object[] = "[object ";
	const char *s = VARDATA_ANY(key);
	int bytes = VARSIZE_ANY_EXHDR(key);

	if (bytes < 2)
		return false;
	return (s[0] == '{' && s[bytes - 1] == '}' && !IsUuidInBraces(key)) ||
		   (bytes >= (int) sizeof(object) - 1 && memcmp(s, object, sizeof(object) - 1) == 0);
}

/*
 * CheckKey throws IK400 unless "key" is a valid name.  The text of an array or an object
 * is refused before its length is checked: it can be the same text for each operation,
 * and the first operation would answer for all of them.
 */
void
CheckKey(const text *key)
{
	if (IsNotScalar(key))
		ereport(ERROR,
				(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
				 errmsg("idempotency key is an array or an object"),
				 errdetail("A key is one value; drivers pass an array or an object as its text."),
				 errhint("Pass the key as text, or pass an array to idempotency.once_many().")));
	CheckName(key, "key");
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
 * ScopeFromArg returns the scope that the first argument passes.  Throws IK400, or 42501
 * unless it begins with the login role's prefix.
 */
text *
ScopeFromArg(FunctionCallInfo fcinfo)
{
	text *scope = NameFromArg(fcinfo, 0, "scope");

	CheckScopePrefix(scope);
	return scope;
}

/*
 * KeyNameFromArgs fills "name" from the scope and the key that the first two arguments
 * pass, without copies.  Throws IK400 and 42501.
 */
void
KeyNameFromArgs(FunctionCallInfo fcinfo, KeyName *name)
{
	text *scope = ScopeFromArg(fcinfo);
	text *key;

	if (PG_ARGISNULL(1))
		ErrorNameMissing("key");
	key = PG_GETARG_TEXT_PP(1);
	CheckKey(key);
	KeyNameSet(scope, key, name);
}

/*
 * KeyNameSet fills "name" from a checked scope and key.
 */
void
KeyNameSet(text *scope, text *key, KeyName *name)
{
	name->scope = scope;
	name->key = key;
	name->lock = 0;
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
 * KeyNameCopy copies a name into the current memory context.
 */
void
KeyNameCopy(const KeyName *from, KeyName *to)
{
	to->scope = TextCopy(from->scope);
	to->key = TextCopy(from->key);
	to->lock = from->lock;
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

/*
 * KeyNameEquals tells whether both name the same operation.
 */
bool
KeyNameEquals(const KeyName *a, const KeyName *b)
{
	return TextEquals(a->key, b->key) && TextEquals(a->scope, b->scope);
}
