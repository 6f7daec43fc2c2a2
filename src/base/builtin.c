/*-------------------------------------------------------------------------
 *
 * base/builtin.c
 *	  Functions of the server under the names that the extension's types give them.
 *
 * For a function that an extension declares as LANGUAGE internal, the server searches the
 * names of all its functions, one by one, each time that a query or an index is prepared.
 * That takes longer than to claim a key.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/fmgrprotos.h"

#include "base/compat.h"

/* Defines the C function "name" as another name of a function of the server. */
#define BUILTIN(name, function)                                                                    \
	PG_FUNCTION_INFO_V1(name);                                                                     \
	Datum name(PG_FUNCTION_ARGS)                                                                   \
	{                                                                                              \
		return function(fcinfo);                                                                   \
	}                                                                                              \
	extern Datum name(PG_FUNCTION_ARGS)

/* The type document */
BUILTIN(idempotency_document_in, json_in);
BUILTIN(idempotency_document_recv, json_recv);

/* The type identifier, and the cast from character */
BUILTIN(idempotency_identifier_in, textin);
BUILTIN(idempotency_identifier_out, textout);
BUILTIN(idempotency_identifier_recv, textrecv);
BUILTIN(idempotency_identifier_send, textsend);
BUILTIN(idempotency_identifier_from_character, rtrim1);

/* The operators of the type keytext, and its operator class */
BUILTIN(idempotency_keytext_lt, bytealt);
BUILTIN(idempotency_keytext_le, byteale);
BUILTIN(idempotency_keytext_eq, byteaeq);
BUILTIN(idempotency_keytext_ne, byteane);
BUILTIN(idempotency_keytext_ge, byteage);
BUILTIN(idempotency_keytext_gt, byteagt);
BUILTIN(idempotency_keytext_cmp, byteacmp);
BUILTIN(idempotency_keytext_sortsupport, bytea_sortsupport);
