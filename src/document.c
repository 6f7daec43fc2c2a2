/*-------------------------------------------------------------------------
 *
 * document.c
 *	  The cast from jsonb to idempotency.document.
 *
 * The type has json's own input and output functions.  What comes from jsonb
 * is JSON already, so that parsing its text once more, as a cast through the
 * I/O functions would, is work in vain on the hot path of every claim.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/jsonb.h"

#include "compat.h"

PG_FUNCTION_INFO_V1(idempotency_document_from_jsonb);

/*
 * document(jsonb) RETURNS document: the text of the value, as jsonb_out has it
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
