/*-------------------------------------------------------------------------
 *
 * request/http.c
 *	  The Idempotency-Key header, and problem details (RFC 9457).
 *
 * The header is an Item of RFC 8941 whose bare item is a String.  What section 4.2
 * of the RFC does not allow is refused and never repaired: two servers that repair
 * a key in different ways would run an operation twice.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_collation.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "regex/regex.h"
#include "utils/builtins.h"
#include "utils/json.h"

#include "base/compat.h"
#include "base/errors.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_parse_header);

/*
 * The parameters of an item (RFC 8941, sections 3.1.2 and 3.3), as a regular
 * expression.  The draft defines none, and says to ignore others.  Base64 may lack
 * its padding (section 4.2.7), but not a part of it.
 */
#define NAME "[a-z*][a-z0-9_.*-]*"
#define NUMBER "-?(?:[0-9]{1,15}|[0-9]{1,12}[.][0-9]{1,3})"
#define STRING "\"(?:[ !#-Z^-~]|\\[|\\]|\\\\[\"\\\\])*\""
#define TOKEN "[A-Za-z*][A-Za-z0-9!#$%&'*+.^_`|~:/-]*"
#define BINARY ":(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?:"
#define BOOLEAN "[?][01]"
#define VALUE "(?:" NUMBER "|" STRING "|" TOKEN "|" BINARY "|" BOOLEAN ")"
#define PARAMETERS "^(?:; *" NAME "(?:=" VALUE ")?)*"

/*
 * ErrorMalformedHeader reports what is wrong at "at" in a header field.  All before
 * it is ASCII, so bytes are characters.
 */
pg_noreturn static void
ErrorMalformedHeader(const char *header, const char *at, const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("malformed Idempotency-Key header"),
			 errdetail("At character %d: %s.", (int) (at - header) + 1, what),
			 errhint("The value is an RFC 8941 string in double quotes, such as "
					 "\"8e03978e-40d5-43dd-bc93-6894a57f9324\".")));
}

/*
 * ParseString appends the string whose opening quote is at "at" to "value", and
 * returns where it ends.
 */
static const char *
ParseString(const char *header, const char *at, StringInfo value)
{
	for (at++; *at != '"'; at++)
	{
		if (*at == '\0')
			ErrorMalformedHeader(header, at, "the string has no closing quote");
		if (IS_HIGHBIT_SET(*at))
			ErrorMalformedHeader(header, at, "a string cannot contain a character outside ASCII");
		if (*at < ' ' || *at == 0x7F)
			ErrorMalformedHeader(header, at, "a string cannot contain a control character");
		if (*at == '\\')
		{
			at++;
			if (*at != '"' && *at != '\\')
				ErrorMalformedHeader(header, at,
									 "only a quote or a backslash can follow a backslash");
		}
		appendStringInfoChar(value, *at);
	}
	return at + 1;
}

/*
 * SkipParameters returns where the valid parameters at "at" end.
 */
static const char *
SkipParameters(const char *at)
{
	regmatch_t match;

	if (*at != ';')
		return at;
	(void) RE_compile_and_execute(cstring_to_text(PARAMETERS), unconstify(char *, at), strlen(at),
								  REG_ADVANCED, C_COLLATION_OID, 1, &match);
	return at + match.rm_eo; /* all that matches is ASCII */
}

/*
 * idempotency_parse_header is parse_header(text): the key in the header field's
 * value.  Throws IK400 unless that is a string of 1 to 255 characters.
 */
Datum
idempotency_parse_header(PG_FUNCTION_ARGS)
{
	const char *header;
	const char *at;
	StringInfoData key;

	if (PG_ARGISNULL(0))
		ErrorNameMissing("key");
	header = text_to_cstring(PG_GETARG_TEXT_PP(0));
	at = header + strspn(header, " ");
	if (*at == '\0')
		ErrorNameMissing("key");
	if (*at != '"')
		ErrorMalformedHeader(header, at, "the value is not a string in double quotes");

	initStringInfo(&key);
	at = SkipParameters(ParseString(header, at, &key));
	at += strspn(at, " ");
	if (*at == ',')
		ErrorMalformedHeader(header, at, "the value is a list instead of one string");
	if (*at != '\0')
		ErrorMalformedHeader(header, at, "only valid parameters can follow the string");

	if (key.len == 0)
		ErrorNameMissing("key");
	if (key.len > KEYNAME_MAX_CHARS)
		ErrorNameTooLong("key", key.len);
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key.data, key.len));
}

/*
 * ProblemDocument returns problem details as JSON text, palloc'ed in the current
 * context.  "detail" may be NULL.  The type is about:blank: title and detail say
 * all beyond the status.
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
