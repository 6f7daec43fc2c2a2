/*-------------------------------------------------------------------------
 *
 * request/document.c
 *	  The cast from jsonb to idempotency.document.
 *
 * A cast through the I/O functions would parse the text of the jsonb again, in every
 * claim.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/jsonb.h"

#include "base/compat.h"

PG_FUNCTION_INFO_V1(idempotency_document_from_jsonb);

/*
 * document(jsonb) RETURNS document: the text of the value, as from jsonb_out()
 */
Datum
idempotency_document_from_jsonb(PG_FUNCTION_ARGS)
{
	Jsonb *value = PG_GETARG_JSONB_P(0);
	StringInfoData out;

	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);
	(void) JsonbToCString(&out, &value->root, VARSIZE(value));
	SET_VARSIZE(out.data, out.len);
	PG_RETURN_POINTER(out.data);
}
