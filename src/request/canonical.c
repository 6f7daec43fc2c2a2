/*-------------------------------------------------------------------------
 *
 * request/canonical.c
 *	  The canonical text of a JSON document: RFC 8785, with exact numbers.
 *
 * The server's jsonb parses the document, and decides what is JSON and which of two
 * members with the same name counts (the last).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/jsonb.h"

#include "base/compat.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_canonical);

/* One member of an object. */
typedef struct Member
{
	JsonbValue value;
	const char *name;
	const char *utf8; /* the name in UTF-8, the sort key */
	int nameLength;
	int utf8Length;
} Member;

/*
 * Utf8OfServerText returns "length" bytes in the server's encoding as UTF-8, and the new
 * length: the argument itself if it needs no conversion, otherwise a palloc'ed copy.
 * Text in SQL_ASCII is not converted.  Throws the server's error for an encoding without
 * a conversion to UTF-8.
 */
const char *
Utf8OfServerText(const char *bytes, int length, int *utf8Length)
{
	int encoding = GetDatabaseEncoding();
	int i = 0;

	*utf8Length = length;
	if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII)
		return bytes;

	while (i < length && !IS_HIGHBIT_SET(bytes[i]))
		i++;
	if (i == length)
		return bytes;

	bytes = pg_server_to_any(bytes, length, PG_UTF8);
	*utf8Length = strlen(bytes);
	return bytes;
}

/*
 * Utf16Rank maps a byte of UTF-8 so that comparing ranks compares UTF-16 code units.  The
 * orders differ in one point: surrogates, which encode code points from U+10000 (first
 * bytes from F0), precede U+E000 to U+FFFF (first bytes EE and EF).
 */
static inline int
Utf16Rank(unsigned char byte)
{
	if (byte < 0xEE)
		return byte;
	return byte < 0xF0 ? byte + 0x10 : byte - 2;
}

/*
 * CompareMembers is a qsort comparator by the UTF-16 code units of names.
 */
static int
CompareMembers(const void *a, const void *b)
{
	const Member *left = a;
	const Member *right = b;
	int common = Min(left->utf8Length, right->utf8Length);

	for (int i = 0; i < common; i++)
	{
		unsigned char l = left->utf8[i];
		unsigned char r = right->utf8[i];

		if (l != r)
			return Utf16Rank(l) - Utf16Rank(r);
	}
	return left->utf8Length - right->utf8Length;
}

/*
 * WriteString appends a string in double quotes, with the escapes that RFC 8785 requires.
 * In every server encoding the bytes compared here are never part of another character.
 */
static void
WriteString(StringInfo out, const char *string, int length)
{
	static const char shortEscapes[] = {
		['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r',
	};
	int written = 0;

	appendStringInfoChar(out, '"');
	for (int i = 0; i < length; i++)
	{
		unsigned char c = string[i];

		if (likely(c >= 0x20 && c != '"' && c != '\\'))
			continue;

		appendBinaryStringInfo(out, string + written, i - written);
		written = i + 1;
		appendStringInfoChar(out, '\\');
		if (c >= 0x20)
			appendStringInfoChar(out, c);
		else if (c < lengthof(shortEscapes) && shortEscapes[c] != '\0')
			appendStringInfoChar(out, shortEscapes[c]);
		else
			appendStringInfo(out, "u%04x", c);
	}
	appendBinaryStringInfo(out, string + written, length - written);
	appendStringInfoChar(out, '"');
}

static void WriteValue(StringInfo out, const JsonbValue *value);

/*
 * WriteObject appends the object that "iterator" has just entered, and consumes the
 * iterator.
 */
static void
WriteObject(StringInfo out, JsonbIterator *iterator, int count)
{
	Member *members = palloc(sizeof(Member) * count);
	Member *member = members;
	JsonbValue name;

	while (JsonbIteratorNext(&iterator, &name, true) == WJB_KEY)
	{
		CHECK_FOR_INTERRUPTS();
		member->name = name.val.string.val;
		member->nameLength = name.val.string.len;
		member->utf8 = Utf8OfServerText(member->name, member->nameLength, &member->utf8Length);
		(void) JsonbIteratorNext(&iterator, &member->value, true);
		member++;
	}
	Assert(member == members + count);
	qsort(members, count, sizeof(Member), CompareMembers);

	appendStringInfoChar(out, '{');
	for (member = members; member < members + count; member++)
	{
		if (member > members)
			appendStringInfoChar(out, ',');
		WriteString(out, member->name, member->nameLength);
		appendStringInfoChar(out, ':');
		WriteValue(out, &member->value);
	}
	appendStringInfoChar(out, '}');
	pfree(members);
}

/*
 * WriteContainer appends an array or object.  It needs less of the stack than the server's
 * parser, but the parser's limit can have been another one.
 */
static void
WriteContainer(StringInfo out, JsonbContainer *container)
{
	JsonbIterator *iterator = JsonbIteratorInit(container);
	JsonbValue value;

	check_stack_depth();
	if (JsonbIteratorNext(&iterator, &value, true) == WJB_BEGIN_OBJECT)
	{
		WriteObject(out, iterator, value.val.object.nPairs);
		return;
	}

	/* at the end, the iterator frees itself */
	appendStringInfoChar(out, '[');
	for (bool first = true; JsonbIteratorNext(&iterator, &value, true) == WJB_ELEM; first = false)
	{
		if (!first)
			appendStringInfoChar(out, ',');
		WriteValue(out, &value);
	}
	appendStringInfoChar(out, ']');
}

/*
 * WriteValue appends a scalar, an array or an object.
 */
static void
WriteValue(StringInfo out, const JsonbValue *value)
{
	CHECK_FOR_INTERRUPTS();
	switch (value->type)
	{
		case jbvNull:
			appendBinaryStringInfo(out, "null", 4);
			break;
		case jbvBool:
			appendStringInfoString(out, value->val.boolean ? "true" : "false");
			break;
		case jbvNumeric:
			NumberAppend(out, value->val.numeric);
			break;
		case jbvString:
			WriteString(out, value->val.string.val, value->val.string.len);
			break;
		case jbvBinary:
			WriteContainer(out, value->val.binary.data);
			break;
		default:
			ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),
							errmsg("unexpected type %d of a jsonb value", (int) value->type)));
	}
}

/*
 * CanonicalAppend appends the canonical form of a document, in the server's encoding.
 * Throws what DocumentRoot() throws, 54001 if the document is too deep, and what
 * NumberAppend() throws.
 */
void
CanonicalAppend(StringInfo out, Document *document)
{
	JsonbContainer *root = DocumentRoot(document);
	JsonbValue scalar;

	if (JsonContainerIsScalar(root) && JsonbExtractScalar(root, &scalar))
		WriteValue(out, &scalar);
	else
		WriteContainer(out, root);
}

/*
 * CanonicalOfDocument returns the canonical form of a document, palloc'ed in the current
 * context.  Throws what CanonicalAppend() throws.
 */
text *
CanonicalOfDocument(Document *document)
{
	StringInfoData out;

	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);
	CanonicalAppend(&out, document);
	SET_VARSIZE(out.data, out.len);
	return (text *) out.data;
}

/*
 * canonical(document) RETURNS text
 */
Datum
idempotency_canonical(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(CanonicalOfDocument(DocumentFromArg(fcinfo, 0)));
}
