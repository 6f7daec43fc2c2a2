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
#include "settings/guc.h"

PG_FUNCTION_INFO_V1(idempotency_parse_header);
PG_FUNCTION_INFO_V1(idempotency_problem_of_error);
PG_FUNCTION_INFO_V1(idempotency_problem_headers_of_error);

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

/* ----------------------------------------------------------------
 * Problem details
 * ----------------------------------------------------------------
 */

/* An error that the IETF draft has an answer for. */
typedef struct Problem
{
	int sqlstate;
	int status;
	const char *phrase; /* HTTP's name of the status: the title of about:blank */
	const char *title;	/* of the draft, with a link to the documentation */
	const char *detail;
} Problem;

static const Problem problems[] = {
	{ERRCODE_IDEMPOTENCY_BAD_KEY, 400, "Bad Request", "Idempotency-Key is missing or malformed",
	 "This operation requires an idempotency key of 1 to 255 characters; the header has it in "
	 "double quotes, such as Idempotency-Key: \"8e03978e-40d5-43dd-bc93-6894a57f9324\"."},
	{ERRCODE_IDEMPOTENCY_IN_PROGRESS, 409, "Conflict",
	 "A request is outstanding for this Idempotency-Key",
	 "An operation with this idempotency key is in progress. Retry later with the same key."},
	{ERRCODE_IDEMPOTENCY_KEY_REUSED, 422, "Unprocessable Content",
	 "Idempotency-Key is already used",
	 "This idempotency key was used with another request. A new request needs a new key."},
};

static const Problem *
ProblemFind(int sqlstate)
{
	for (size_t i = 0; i < lengthof(problems); i++)
	{
		if (problems[i].sqlstate == sqlstate)
			return &problems[i];
	}
	return NULL;
}

/*
 * ProblemText returns problem details as JSON text, palloc'ed in the current context.
 * "detail" may be NULL.
 */
static text *
ProblemText(const char *type, const char *title, int status, const char *detail)
{
	StringInfoData json;
	text *document;

	initStringInfo(&json);
	appendStringInfoString(&json, "{\"type\":");
	escape_json(&json, type);
	appendStringInfoString(&json, ",\"title\":");
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
 * ProblemDocument returns the problem details of an application's error.  The type is
 * about:blank: title and detail say all beyond the status.
 */
text *
ProblemDocument(int status, const char *title, const char *detail)
{
	return ProblemText("about:blank", title, status, detail);
}

/*
 * ProblemBody returns the problem details for an SQLSTATE, or NULL.  The type is the link
 * to the documentation, or about:blank.
 */
text *
ProblemBody(int sqlstate)
{
	const Problem *problem = ProblemFind(sqlstate);
	const char *link = DocumentationUri();

	if (problem == NULL)
		return NULL;
	if (*link == '\0')
		return ProblemDocument(problem->status, problem->phrase, problem->detail);
	return ProblemText(link, problem->title, problem->status, problem->detail);
}

/*
 * ProblemHeaders returns the headers of the answer whose body is ProblemBody(), as a JSON
 * object, or NULL.  An operation in progress has Retry-After, in seconds.
 */
text *
ProblemHeaders(int sqlstate, int retryAfter)
{
	const Problem *problem = ProblemFind(sqlstate);
	const char *link = DocumentationUri();
	StringInfoData json;

	if (problem == NULL)
		return NULL;
	initStringInfo(&json);
	appendStringInfoString(&json, "{\"Content-Type\":\"application/problem+json\"");
	if (*link != '\0')
	{
		appendStringInfoString(&json, ",\"Link\":");
		escape_json(&json, psprintf("<%s>; rel=\"describedby\"", link));
	}
	if (sqlstate == ERRCODE_IDEMPOTENCY_IN_PROGRESS)
		appendStringInfo(&json, ",\"Retry-After\":\"%d\"", retryAfter);
	appendStringInfoChar(&json, '}');
	return cstring_to_text_with_len(json.data, json.len);
}

/*
 * SqlstateFromArg returns the SQLSTATE that the first argument passes; 0 for a text that is none.
 */
static int
SqlstateFromArg(FunctionCallInfo fcinfo)
{
	const char *code = text_to_cstring(PG_GETARG_TEXT_PP(0));
	int sqlstate = 0;

	if (strlen(code) == 5)
		sqlstate = MAKE_SQLSTATE(code[0], code[1], code[2], code[3], code[4]);
	return strcmp(unpack_sql_state(sqlstate), code) == 0 ? sqlstate : 0;
}

/*
 * problem(sqlstate) RETURNS json: for the SQLSTATE of an error that the caller has caught
 */
Datum
idempotency_problem_of_error(PG_FUNCTION_ARGS)
{
	text *body = ProblemBody(SqlstateFromArg(fcinfo));

	if (body == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(body);
}

/*
 * problem_headers(sqlstate) RETURNS json
 */
Datum
idempotency_problem_headers_of_error(PG_FUNCTION_ARGS)
{
	text *headers = ProblemHeaders(SqlstateFromArg(fcinfo), PROBLEM_RETRY_AFTER);

	if (headers == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(headers);
}
