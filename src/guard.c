/*-------------------------------------------------------------------------
 *
 * guard.c
 *	  require_claim() and current_key(): what a table may ask about the claims
 *	  of the transaction that writes to it.
 *
 * Both look into backend-local memory (xact.c) and nowhere else.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "commands/trigger.h"
#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "errors.h"
#include "xact.h"

PG_FUNCTION_INFO_V1(idempotency_require_claim);
PG_FUNCTION_INFO_V1(idempotency_current_key);

/*
 * require_claim([scope]): a trigger that refuses (IK403) every write of a
 * transaction whose last call about the scope granted no claim.  The scope may
 * end in "*", which is also what a missing one means.  Throws 39P01 unless it
 * is called BEFORE or AFTER a write, with one argument at most.
 */
Datum
idempotency_require_claim(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const char *pattern = "*";
	bool asked;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ErrorNotATrigger();
	if (TRIGGER_FIRED_INSTEAD(trigdata->tg_event))
		ErrorTriggerInstead(get_namespace_name(RelationGetNamespace(trigdata->tg_relation)),
							RelationGetRelationName(trigdata->tg_relation));
	if (trigdata->tg_trigger->tgnargs > 1)
		ErrorTriggerArguments();
	if (trigdata->tg_trigger->tgnargs == 1)
		pattern = trigdata->tg_trigger->tgargs[0];

	if (!ScopeGranted(pattern, &asked))
		ErrorClaimRequired(get_namespace_name(RelationGetNamespace(trigdata->tg_relation)),
						   RelationGetRelationName(trigdata->tg_relation), pattern, asked);

	/* A BEFORE ROW trigger goes on with the row it was given. */
	if (TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event))
		return PointerGetDatum(trigdata->tg_newtuple);
	return PointerGetDatum(trigdata->tg_trigtuple);
}

/*
 * current_key(scope) RETURNS text: the key that this transaction claimed last
 * in the scope, or NULL if its last call there granted none.
 */
Datum
idempotency_current_key(PG_FUNCTION_ARGS)
{
	const text *key = ScopeCurrentKey(ScopeFromArg(fcinfo, 0));

	if (key == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(TextCopy(key));
}
