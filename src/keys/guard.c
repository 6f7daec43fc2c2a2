/*-------------------------------------------------------------------------
 *
 * keys/guard.c
 *	  require_claim() and current_key(), for tables that require a claim; check_commit() and
 *	  end_event().
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "commands/trigger.h"
#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "base/errors.h"
#include "base/pattern.h"
#include "keys/transaction.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_require_claim);
PG_FUNCTION_INFO_V1(idempotency_current_key);
PG_FUNCTION_INFO_V1(idempotency_check_commit);
PG_FUNCTION_INFO_V1(idempotency_end_event);

/*
 * ErrorClaimRequired reports a write to a guarded table.  "asked" tells whether the
 * transaction has tried to claim a key in the scope.
 */
pg_noreturn static void
ErrorClaimRequired(Relation table, const char *scopePattern, bool asked)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_IDEMPOTENCY_CLAIM_REQUIRED),
		 errmsg("write to table \"%s.%s\" without a claim",
				get_namespace_name(RelationGetNamespace(table)), RelationGetRelationName(table)),
		 asked ? errdetail("The last claim of this transaction in scope \"%s\" was not granted, "
						   "or was released or forgotten.",
						   scopePattern)
			   : errdetail("This transaction has claimed no key in scope \"%s\".", scopePattern),
		 errhint("Call idempotency.claim() first, and write only if it did not replay.")));
}

pg_noreturn static void
ErrorBadTrigger(const char *message, const char *hint)
{
	ereport(ERROR, (errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED), errmsg("%s", message),
					errhint("%s", hint)));
}

/*
 * ErrorTriggerInstead reports an INSTEAD OF trigger: PostgreSQL would assume that the
 * trigger has written the row.
 */
pg_noreturn static void
ErrorTriggerInstead(Relation view)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
		 errmsg("idempotency.require_claim() was called INSTEAD OF a write to view \"%s.%s\"",
				get_namespace_name(RelationGetNamespace(view)), RelationGetRelationName(view)),
		 errdetail("The write would be lost silently."),
		 errhint("Create the trigger BEFORE or AFTER the write, on the table behind the view.")));
}

/*
 * require_claim([pattern]): a trigger that refuses (IK403) every write of a transaction
 * whose latest call about a scope that the pattern matches granted no claim.  The default
 * is "*".  Throws 39P01 unless it is called BEFORE or AFTER a write, with one
 * argument at most, and IK400 or 22023 for a pattern that is not valid.
 */
Datum
idempotency_require_claim(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const char *pattern = "*";
	bool asked;

	/* Check the trigger */
	if (!CALLED_AS_TRIGGER(fcinfo))
		ErrorBadTrigger("idempotency.require_claim() was not called as a trigger",
						"Use CREATE TRIGGER ... EXECUTE FUNCTION "
						"idempotency.require_claim('scope').");
	if (TRIGGER_FIRED_INSTEAD(trigdata->tg_event))
		ErrorTriggerInstead(trigdata->tg_relation);
	if (trigdata->tg_trigger->tgnargs > 1)
		ErrorBadTrigger("idempotency.require_claim() takes one argument at most",
						"Pass a pattern of scopes.");
	if (trigdata->tg_trigger->tgnargs == 1)
		pattern = trigdata->tg_trigger->tgargs[0];
	PatternCheck(cstring_to_text(pattern), "scope");

	if (!ScopeGranted(cstring_to_text(pattern), &asked))
		ErrorClaimRequired(trigdata->tg_relation, pattern, asked);

	/* Return the row as it is, for a BEFORE ROW trigger */
	if (TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event))
		return PointerGetDatum(trigdata->tg_newtuple);
	return PointerGetDatum(trigdata->tg_trigtuple);
}

/*
 * current_key(scope) RETURNS text: the key that this transaction claimed last in the
 * scope, or NULL if its latest call there granted no claim.
 */
Datum
idempotency_current_key(PG_FUNCTION_ARGS)
{
	const text *key = ScopeCurrentKey(ScopeFromArg(fcinfo));

	if (key == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(TextCopy(key));
}

/*
 * check_commit() RETURNS boolean: true.  Throws what COMMIT would throw now, without the
 * deferred triggers, which could still finish a claim.
 */
Datum
idempotency_check_commit(PG_FUNCTION_ARGS)
{
	CheckMayCommit(false);
	PG_RETURN_BOOL(true);
}

/*
 * end_event() RETURNS boolean: true, after what calls have told require_claim(), current_key() and
 * publish() is forgotten.
 */
Datum
idempotency_end_event(PG_FUNCTION_ARGS)
{
	ScopeForgetResults();
	PG_RETURN_BOOL(true);
}
