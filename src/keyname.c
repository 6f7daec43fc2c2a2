/*-------------------------------------------------------------------------
 *
 * keyname.c
 *	  Checks the scope and the key that callers pass.
 *
 * Only what a caller passes is checked, never what is stored: a dump of another
 * encoding, or of another version, must be restored whole.
 *
 * A key is refused (IK400) when no client sends it on purpose: NULL, empty,
 * longer than 255 characters, or with a control character in it.  A scope is
 * held to the same, and to the login role's idempotency.scope_prefix.
 *
 * Takes no locks, touches no tables (prefix.c does, once a session).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "mb/pg_wchar.h"

#include "errors.h"
#include "keyname.h"
#include "prefix.h"

/*
 * HasC1Bytes tells whether the bytes 80 to 9F are the C1 controls in an encoding of
 * single bytes: in the ISO 8859 family, whose text becomes U+0080 to U+009F in
 * UTF-8.  In the other ones they are printed characters.
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
 * ControlCharacterAt returns the position (from 1) of the first control
 * character in "s", or 0.  C1 controls count too, in UTF-8 and ISO 8859.
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
 * CheckName throws IK400 unless "value" may serve as a name; "what" says of
 * what: scope, key, topic or subscription.
 */
void
CheckName(const text *value, const char *what)
{
	const char *s = VARDATA_ANY(value);
	int bytes = VARSIZE_ANY_EXHDR(value);
	int position;

	if (bytes == 0)
		ErrorNameMissing(what);

	/* A character has at least one byte, so most names need no count. */
	if (bytes > KEYNAME_MAX_CHARS)
	{
		int chars = pg_mbstrlen_with_len(s, bytes);

		if (chars > KEYNAME_MAX_CHARS)
			ErrorNameTooLong(what, chars);
	}

	position = ControlCharacterAt(s, bytes);
	if (position > 0)
		ErrorControlCharacter(what, position);
}

/*
 * NameFromArg returns the name that argument "arg" passes, checked.  Throws
 * IK400.
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
 * ScopeFromArg returns the scope that argument "scopeArg" passes, checked.
 * Throws IK400 or 42501.
 */
text *
ScopeFromArg(FunctionCallInfo fcinfo, int scopeArg)
{
	text *scope = NameFromArg(fcinfo, scopeArg, "scope");

	CheckScopePrefix(scope);
	return scope;
}

/*
 * KeyNameFromArgs fills "name" from the scope at argument "scopeArg" and the
 * key right after it.  Throws IK400 or 42501.  The texts stay the caller's.
 */
void
KeyNameFromArgs(FunctionCallInfo fcinfo, int scopeArg, KeyName *name)
{
	text *scope = ScopeFromArg(fcinfo, scopeArg);

	if (PG_ARGISNULL(scopeArg + 1))
		ErrorNameMissing("key");
	KeyNameMake(scope, PG_GETARG_TEXT_PP(scopeArg + 1), name);
}

/*
 * KeyNameMake fills "name" from a checked scope and a key that it checks.
 * Throws IK400.
 */
void
KeyNameMake(text *scope, text *key, KeyName *name)
{
	CheckName(key, "key");
	KeyNameSet(scope, key, name);
}

/*
 * KeyNameSet fills "name" from a scope and a key that were checked before.
 */
void
KeyNameSet(text *scope, text *key, KeyName *name)
{
	name->scope = scope;
	name->key = key;
	name->lock = 0;
}

/*
 * TextCopy returns a copy of "t" in the current memory context; NULL of NULL.
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
