/*-------------------------------------------------------------------------
 *
 * request/canonical.c
 *	  The canonical text of a JSON document: RFC 8785, with exact numbers.
 *
 * The server's jsonb parses the document, and decides what is JSON and which of two
 * members with the same name counts (the last).  A stack on the heap replaces recursion:
 * the server's parser limits the depth of a document.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"

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

/* An array or object whose end is not written yet. */
typedef struct Level
{
	JsonbIterator *elements; /* of an array; NULL for an object */
	Member *members;		 /* of an object, sorted */
	int count;
	int next; /* the number of elements or members written */
} Level;

typedef struct Writer
{
	StringInfo out;
	Level *levels;
	int depth;
	int allocated;
} Writer;

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

/*
 * PushLevel returns a new top level.  Pointers to other levels become invalid.
 */
static Level *
PushLevel(Writer *writer)
{
	if (writer->depth == writer->allocated)
	{
		writer->allocated *= 2;
		writer->levels = repalloc(writer->levels, sizeof(Level) * writer->allocated);
	}
	return &writer->levels[writer->depth++];
}

/*
 * SortMembers fills "level" with the sorted members of the object that "iterator" has
 * just entered, and consumes the iterator.
 */
static void
SortMembers(Level *level, JsonbIterator *iterator, int count)
{
	Member *member = palloc(sizeof(Member) * count);
	JsonbValue name;

	level->members = member;
	level->count = count;
	while (JsonbIteratorNext(&iterator, &name, true) == WJB_KEY)
	{
		CHECK_FOR_INTERRUPTS();
		member->name = name.val.string.val;
		member->nameLength = name.val.string.len;
		member->utf8 = Utf8OfServerText(member->name, member->nameLength, &member->utf8Length);
		(void) JsonbIteratorNext(&iterator, &member->value, true);
		member++;
	}
	Assert(member == level->members + count);
	qsort(level->members, count, sizeof(Member), CompareMembers);
}

/*
 * OpenContainer appends the beginning of an array or object, and pushes a level for the
 * rest.
 */
static void
OpenContainer(Writer *writer, JsonbContainer *container)
{
	Level *level = PushLevel(writer);
	JsonbIterator *iterator = JsonbIteratorInit(container);
	JsonbValue value;

	level->elements = NULL;
	level->members = NULL;
	level->next = 0;
	if (JsonbIteratorNext(&iterator, &value, true) == WJB_BEGIN_ARRAY)
	{
		appendStringInfoChar(writer->out, '[');
		level->elements = iterator;
	}
	else
	{
		appendStringInfoChar(writer->out, '{');
		SortMembers(level, iterator, value.val.object.nPairs);
	}
}

/*
 * WriteValue appends a scalar, or the beginning of a container.
 */
static void
WriteValue(Writer *writer, const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvNull:
			appendBinaryStringInfo(writer->out, "null", 4);
			break;
		case jbvBool:
			appendStringInfoString(writer->out, value->val.boolean ? "true" : "false");
			break;
		case jbvNumeric:
			NumberAppend(writer->out, value->val.numeric);
			break;
		case jbvString:
			WriteString(writer->out, value->val.string.val, value->val.string.len);
			break;
		case jbvBinary:
			OpenContainer(writer, value->val.binary.data);
			break;
		default:
			ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),
							errmsg("unexpected type %d of a jsonb value", (int) value->type)));
	}
}

/*
 * WriteNext appends the next element or member of the top level, or its end, which pops
 * the level.
 */
static void
WriteNext(Writer *writer)
{
	Level *level = &writer->levels[writer->depth - 1];
	JsonbValue element;
	const JsonbValue *value = &element;

	if (level->elements != NULL)
	{
		/* at the end, the iterator frees itself */
		if (JsonbIteratorNext(&level->elements, &element, true) != WJB_ELEM)
		{
			appendStringInfoChar(writer->out, ']');
			writer->depth--;
			return;
		}
		if (level->next++ > 0)
			appendStringInfoChar(writer->out, ',');
	}
	else
	{
		const Member *member = &level->members[level->next];

		if (level->next == level->count)
		{
			appendStringInfoChar(writer->out, '}');
			pfree(level->members);
			writer->depth--;
			return;
		}
		if (level->next++ > 0)
			appendStringInfoChar(writer->out, ',');
		WriteString(writer->out, member->name, member->nameLength);
		appendStringInfoChar(writer->out, ':');
		value = &member->value;
	}
	WriteValue(writer, value);
}

/*
 * CanonicalAppend appends the canonical form of a document, in the server's encoding.  It
 * leaves scratch memory in the current context.  Throws what DocumentRoot() throws.
 */
void
CanonicalAppend(StringInfo out, Document *document)
{
	JsonbContainer *root = DocumentRoot(document);
	Writer writer = {.out = out, .allocated = 16};
	JsonbValue scalar;

	writer.levels = palloc(sizeof(Level) * writer.allocated);
	if (JsonContainerIsScalar(root) && JsonbExtractScalar(root, &scalar))
		WriteValue(&writer, &scalar);
	else
		OpenContainer(&writer, root);

	while (writer.depth > 0)
	{
		CHECK_FOR_INTERRUPTS();
		WriteNext(&writer);
	}
}

/*
 * CanonicalOfDocument returns the canonical form of a document, palloc'ed in the current
 * context, without scratch memory.  Throws what CanonicalAppend() throws.
 */
text *
CanonicalOfDocument(Document *document)
{
	MemoryContext scratch = AllocSetContextCreate(CurrentMemoryContext, "idempotency canonical",
												  ALLOCSET_DEFAULT_SIZES);
	StringInfoData out;
	MemoryContext caller;

	/* the buffer becomes the result, so it belongs to the caller's context */
	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);

	caller = MemoryContextSwitchTo(scratch);
	CanonicalAppend(&out, document);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(scratch);

	SET_VARSIZE(out.data, out.len);
	return (text *) out.data;
}

/*
 * idempotency_canonical is canonical(document).
 */
Datum
idempotency_canonical(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(CanonicalOfDocument(DocumentFromArg(fcinfo, 0)));
}
