/*-------------------------------------------------------------------------
 *
 * http.c
 *	  What HTTP says about idempotency keys, in and out.
 *
 * In: the Idempotency-Key header, an Item of RFC 8941 whose bare item is a
 * String.  The parser is as strict as section 4.2 of the RFC: what it does
 * not allow is refused, never repaired, because two servers that repair a key
 * in two ways would run an operation twice.  Out: problem details (RFC 9457)
 * for the outcomes that are errors.
 *
 * Pure functions: nothing here takes a lock or outlives the call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/builtins.h"
#include "utils/json.h"

#include "compat.h"
#include "errors.h"
#include "http.h"
#include "operation.h"

PG_FUNCTION_INFO_V1(idempotency_parse_header);
PG_FUNCTION_INFO_V1(idempotency_problem);

/* RFC 8941, section 3.3: the most digits of a number. */
#define MAX_INTEGER_DIGITS 15
#define MAX_DECIMAL_INTEGER_DIGITS 12
#define MAX_DECIMAL_FRACTION_DIGITS 3

/* How many characters of base64 stand for three bytes. */
#define BASE64_GROUP 4

/* The status codes of the two outcomes that are errors. */
#define STATUS_CONFLICT 409
#define STATUS_UNPROCESSABLE 422

/* Where the parser stands; "end" points to the NUL. */
typedef struct Cursor
{
	const char *start;
	const char *at;
	const char *end;
} Cursor;

#define IsLower(c) ((c) >= 'a' && (c) <= 'z')
#define IsUpper(c) ((c) >= 'A' && (c) <= 'Z')
#define IsDigit(c) ((c) >= '0' && (c) <= '9')

/*
 * OneOf returns whether c is one of the characters in "set".  A NUL is none.
 */
static inline bool
OneOf(char c, const char *set)
{
	return c != '\0' && strchr(set, c) != NULL;
}

pg_noreturn static void Malformed(const Cursor *cursor, const char *what);

/*
 * Malformed throws IK400: "what" is wrong where the cursor stands.  All that
 * the cursor has passed is ASCII, so bytes are characters.
 */
static void
Malformed(const Cursor *cursor, const char *what)
{
	ErrorMalformedHeader(
		psprintf("At character %d: %s.", (int) (cursor->at - cursor->start) + 1, what));
}

/*
 * SkipSpaces passes any spaces; a tab is none.
 */
static void
SkipSpaces(Cursor *cursor)
{
	while (*cursor->at == ' ')
		cursor->at++;
}

/*
 * ParseString passes a string, the cursor being at its opening quote, and
 * appends what it says to "value".
 */
static void
ParseString(Cursor *cursor, StringInfo value)
{
	for (cursor->at++; *cursor->at != '"'; cursor->at++)
	{
		if (cursor->at == cursor->end)
			Malformed(cursor, "the string has no closing quote");
		if (IS_HIGHBIT_SET(*cursor->at))
			Malformed(cursor, "a string cannot contain a character outside ASCII");
		if (*cursor->at < ' ' || *cursor->at == 0x7F)
			Malformed(cursor, "a string cannot contain a control character");
		if (*cursor->at == '\\')
		{
			cursor->at++;
			if (!OneOf(*cursor->at, "\"\\"))
				Malformed(cursor, "only a quote or a backslash can follow a backslash");
		}
		appendStringInfoChar(value, *cursor->at);
	}
	cursor->at++;
}

/*
 * ParseNumber passes an integer or a decimal.
 */
static void
ParseNumber(Cursor *cursor)
{
	int digits = 0;
	int fraction = 0;

	if (*cursor->at == '-')
		cursor->at++;
	for (; IsDigit(*cursor->at); cursor->at++)
		digits++;
	if (digits == 0)
		Malformed(cursor, "a digit is missing");
	if (*cursor->at != '.')
	{
		if (digits > MAX_INTEGER_DIGITS)
			Malformed(cursor, "an integer has at most 15 digits");
		return;
	}

	if (digits > MAX_DECIMAL_INTEGER_DIGITS)
		Malformed(cursor, "a decimal has at most 12 digits before its point");
	for (cursor->at++; IsDigit(*cursor->at); cursor->at++)
		fraction++;
	if (fraction == 0 || fraction > MAX_DECIMAL_FRACTION_DIGITS)
		Malformed(cursor, "a decimal has 1 to 3 digits after its point");
}

/*
 * ParseToken passes a token.
 */
static void
ParseToken(Cursor *cursor)
{
	while (IsLower(*cursor->at) || IsUpper(*cursor->at) || IsDigit(*cursor->at) ||
		   OneOf(*cursor->at, "!#$%&'*+-.^_`|~:/"))
		cursor->at++;
}

/*
 * ParseBinary passes a byte sequence, the cursor being at its first colon.
 *
 * RFC 8941, section 4.2.7, says not to insist on padding, nor on bits of zero in
 * front of it.  Padding that is there must stand at the end, and be complete.
 */
static void
ParseBinary(Cursor *cursor)
{
	int characters = 0;
	int padding = 0;
	int rest; /* characters of the last, incomplete group of four */

	for (cursor->at++; *cursor->at != ':'; cursor->at++)
	{
		char c = *cursor->at;

		if (cursor->at == cursor->end)
			Malformed(cursor, "the byte sequence has no closing colon");
		if (c == '=')
			padding++;
		else if (!IsLower(c) && !IsUpper(c) && !IsDigit(c) && !OneOf(c, "+/"))
			Malformed(cursor, "this is no base64 character");
		else if (padding > 0)
			Malformed(cursor, "base64 has nothing behind its padding");
		else
			characters++;
	}

	rest = characters % BASE64_GROUP;
	if (rest == 1 || (padding > 0 && (rest == 0 || padding != BASE64_GROUP - rest)))
		Malformed(cursor, "the base64 before this has a wrong length or padding");
	cursor->at++;
}

/*
 * ParseBareItem passes the value of a parameter, of any type.
 */
static void
ParseBareItem(Cursor *cursor)
{
	char c = *cursor->at;

	if (c == '"')
	{
		StringInfoData ignored;

		initStringInfo(&ignored);
		ParseString(cursor, &ignored);
		pfree(ignored.data);
	}
	else if (c == '-' || IsDigit(c))
		ParseNumber(cursor);
	else if (c == ':')
		ParseBinary(cursor);
	else if (c == '?')
	{
		cursor->at++;
		if (!OneOf(*cursor->at, "01"))
			Malformed(cursor, "a boolean is ?0 or ?1");
		cursor->at++;
	}
	else if (c == '*' || IsLower(c) || IsUpper(c))
		ParseToken(cursor);
	else
		Malformed(cursor, "the parameter has no valid value");
}

/*
 * ParseParameters passes the parameters of an item, if it has any.  The draft
 * defines none, and says to ignore others.
 */
static void
ParseParameters(Cursor *cursor)
{
	while (*cursor->at == ';')
	{
		cursor->at++;
		SkipSpaces(cursor);
		if (!IsLower(*cursor->at) && *cursor->at != '*')
			Malformed(cursor, "a parameter's name begins with a lower-case letter or an asterisk");
		while (IsLower(*cursor->at) || IsDigit(*cursor->at) || OneOf(*cursor->at, "_-.*"))
			cursor->at++;
		if (*cursor->at == '=')
		{
			cursor->at++;
			ParseBareItem(cursor);
		}
	}
}

/*
 * idempotency_parse_header is parse_header(text): the key that the header
 * field's value says.  Throws IK400 unless that is a string of 1 to 255
 * characters.
 */
Datum
idempotency_parse_header(PG_FUNCTION_ARGS)
{
	StringInfoData key;
	Cursor cursor;

	if (PG_ARGISNULL(0))
		ErrorNameMissing("key");
	cursor.start = cursor.at = text_to_cstring(PG_GETARG_TEXT_PP(0));
	cursor.end = cursor.start + strlen(cursor.start);

	SkipSpaces(&cursor);
	if (cursor.at == cursor.end)
		ErrorNameMissing("key");
	if (*cursor.at != '"')
		Malformed(&cursor, "the value is not a string in double quotes");

	initStringInfo(&key);
	ParseString(&cursor, &key);
	ParseParameters(&cursor);
	SkipSpaces(&cursor);
	if (*cursor.at == ',')
		Malformed(&cursor, "the value is a list, where one string is expected");
	if (cursor.at != cursor.end)
		Malformed(&cursor, "something follows the string");

	if (key.len == 0)
		ErrorNameMissing("key");
	if (key.len > KEYNAME_MAX_CHARS)
		ErrorNameTooLong("key", key.len);
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key.data, key.len));
}

/*
 * ProblemDocument returns problem details as JSON text, palloc'ed in the
 * current context.  "detail" may be NULL.  The type is about:blank: what there
 * is to know beyond the status stands in title and detail.
 */
text *
ProblemDocument(int status, const char *title, const char *detail)
{
	StringInfoData json;
	text *document;

	initStringInfo(&json);
	appendStringInfoString(&json, "{\"type\":\"about:blank\",\"title\":");
	escape_json(&json, title);
	appendStringInfo(&json, ",\"status\":%d", status);
	if (detail != NULL)
	{
		appendStringInfoString(&json, ",\"detail\":");
		escape_json(&json, detail);
	}
	appendStringInfoChar(&json, '}');

	document = cstring_to_text_with_len(json.data, json.len);
	pfree(json.data);
	return document;
}

/*
 * idempotency_problem is problem(operation): problem details for an outcome
 * that is an error, NULL for any other.  The titles are HTTP's names of the
 * status codes, as RFC 9457 has it for about:blank.
 */
Datum
idempotency_problem(PG_FUNCTION_ARGS)
{
	const char *outcome = OperationOutcome(PG_GETARG_HEAPTUPLEHEADER(0));

	if (outcome == NULL)
		PG_RETURN_NULL();
	if (strcmp(outcome, "in_progress") == 0)
		PG_RETURN_TEXT_P(ProblemDocument(STATUS_CONFLICT, "Conflict",
										 "An operation with this idempotency key is in progress. "
										 "Retry later with the same key."));
	if (strcmp(outcome, "mismatched") == 0)
		PG_RETURN_TEXT_P(ProblemDocument(STATUS_UNPROCESSABLE, "Unprocessable Content",
										 "This idempotency key was used with another request. "
										 "A new request needs a new key."));
	PG_RETURN_NULL();
}
