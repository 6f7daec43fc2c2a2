/*-------------------------------------------------------------------------
 *
 * request/document.c
 *	  The type idempotency.document: JSON text, or a jsonb value as it is.
 *
 * A document made from json or text is that text.  One made from jsonb is a mark that
 * begins no JSON text, and then the jsonb, so that the fingerprint of a request needs no
 * parser.  What is stored and returned is always text.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"

#include "base/compat.h"
#include "base/name.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_document_from_jsonb);
PG_FUNCTION_INFO_V1(idempotency_document_out);
PG_FUNCTION_INFO_V1(idempotency_document_send);
PG_FUNCTION_INFO_V1(idempotency_document_to_json);

/* Four bytes, so that the jsonb stays aligned. */
static const char jsonbMark[4] = {1, 1, 1, 1};

static bool
HoldsJsonb(const Document *document)
{
	return VARSIZE_ANY_EXHDR(document) > sizeof(jsonbMark) &&
		   memcmp(VARDATA_ANY(document), jsonbMark, sizeof(jsonbMark)) == 0;
}

/*
 * JsonbOfDocument returns the jsonb of a document that holds one, aligned.
 */
static JsonbContainer *
JsonbOfDocument(Document *document)
{
	document = PG_DETOAST_DATUM(PointerGetDatum(document));
	return (JsonbContainer *) (VARDATA(document) + sizeof(jsonbMark));
}

/*
 * DocumentFromArg returns a document argument, or NULL.
 */
Document *
DocumentFromArg(FunctionCallInfo fcinfo, int arg)
{
	return PG_ARGISNULL(arg) ? NULL : PG_GETARG_VARLENA_PP(arg);
}

/*
 * DocumentText returns the JSON text of a document: the document itself, or what jsonb_out()
 * prints, palloc'ed.  NULL gives NULL.
 */
text *
DocumentText(Document *document)
{
	StringInfoData out;

	if (document == NULL || !HoldsJsonb(document))
		return document;

	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);
	(void) JsonbToCString(&out, JsonbOfDocument(document), VARSIZE_ANY(document));
	SET_VARSIZE(out.data, out.len);
	return (text *) out.data;
}

/*
 * DocumentRoot returns the value of a document: a part of it, or palloc'ed.  Throws the
 * errors of jsonb for text that is not JSON, that jsonb cannot store (\u0000) or that is too
 * deep.
 */
JsonbContainer *
DocumentRoot(Document *document)
{
	if (HoldsJsonb(document))
		return JsonbOfDocument(document);
	return &DatumGetJsonbP(
				DirectFunctionCall1(jsonb_in, CStringGetDatum(text_to_cstring(document))))
				->root;
}

/*
 * document(jsonb) RETURNS document
 */
Datum
idempotency_document_from_jsonb(PG_FUNCTION_ARGS)
{
	Jsonb *value = PG_GETARG_JSONB_P(0);
	Size bytes = VARSIZE(value) - VARHDRSZ;
	Document *document = palloc(VARHDRSZ + sizeof(jsonbMark) + bytes);

	SET_VARSIZE(document, VARHDRSZ + sizeof(jsonbMark) + bytes);
	memcpy(VARDATA(document), jsonbMark, sizeof(jsonbMark));
	memcpy(VARDATA(document) + sizeof(jsonbMark), &value->root, bytes);
	PG_RETURN_POINTER(document);
}

/*
 * document_to_json(document) RETURNS json: never the argument itself, since to_json() frees
 * what a cast returns
 */
Datum
idempotency_document_to_json(PG_FUNCTION_ARGS)
{
	Document *document = PG_GETARG_VARLENA_PP(0);
	text *json = DocumentText(document);

	PG_RETURN_TEXT_P(json == document ? TextCopy(json) : json);
}

/*
 * document_out(document) RETURNS cstring
 */
Datum
idempotency_document_out(PG_FUNCTION_ARGS)
{
	PG_RETURN_CSTRING(text_to_cstring(DocumentText(PG_GETARG_VARLENA_PP(0))));
}

/*
 * document_send(document) RETURNS bytea: the text
 */
Datum
idempotency_document_send(PG_FUNCTION_ARGS)
{
	return DirectFunctionCall1(textsend, PointerGetDatum(DocumentText(PG_GETARG_VARLENA_PP(0))));
}
