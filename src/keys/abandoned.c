/*-------------------------------------------------------------------------
 *
 * keys/abandoned.c
 *	  claim_abandoned(): a completer takes over operations that no client retried.
 *
 * It skips an operation whose lock is not free, so that completers never wait for each
 * other, and never get the same operation.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "base/errors.h"
#include "keys/claim.h"
#include "query/reevaluation.h"
#include "query/relation.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_claim_abandoned);

/* The columns of the result. */
enum
{
	ABANDONED_TOKEN,
	ABANDONED_SCOPE,
	ABANDONED_KEY,
	ABANDONED_REQUEST,
	ABANDONED_ATTEMPT,
	ABANDONED_RECOVERY_POINT,
	ABANDONED_STATE,
	ABANDONED_COLUMNS
};

/* How many operations one search finds. */
#define BATCH 256

static const Oid columnType[ABANDONED_COLUMNS] = {
	[ABANDONED_TOKEN] = INT8OID,   [ABANDONED_SCOPE] = TEXTOID,
	[ABANDONED_KEY] = TEXTOID,	   [ABANDONED_REQUEST] = JSONOID,
	[ABANDONED_ATTEMPT] = INT4OID, [ABANDONED_RECOVERY_POINT] = TEXTOID,
	[ABANDONED_STATE] = JSONOID,
};

static void
PutOperation(ReturnSetInfo *rsinfo, const KeyName *name, const Lease *lease)
{
	Datum values[ABANDONED_COLUMNS] = {
		[ABANDONED_TOKEN] = Int64GetDatum(lease->token),
		[ABANDONED_SCOPE] = PointerGetDatum(name->scope),
		[ABANDONED_KEY] = PointerGetDatum(name->key),
		[ABANDONED_REQUEST] = PointerGetDatum(lease->request),
		[ABANDONED_ATTEMPT] = Int32GetDatum(lease->attempt),
		[ABANDONED_RECOVERY_POINT] = PointerGetDatum(lease->recoveryPoint),
		[ABANDONED_STATE] = PointerGetDatum(lease->state),
	};
	bool isnull[ABANDONED_COLUMNS] = {
		[ABANDONED_REQUEST] = lease->request == NULL,
		[ABANDONED_RECOVERY_POINT] = lease->recoveryPoint == NULL,
		[ABANDONED_STATE] = lease->state == NULL,
	};

	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, isnull);
}

/*
 * TakeOver takes over at most "max" abandoned operations of the scopes that the pattern
 * matches, in the order of their tokens.
 */
static void
TakeOver(ReturnSetInfo *rsinfo, const ScopePattern *scopes, const Interval *lease, int max)
{
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext batch =
		AllocSetContextCreate(caller, "idempotency takeovers", ALLOCSET_DEFAULT_SIZES);
	MemoryContext each =
		AllocSetContextCreate(caller, "idempotency takeover", ALLOCSET_DEFAULT_SIZES);
	ClaimRequest request = {.lease = lease};
	AbandonedKey found[BATCH];
	int64 after = 0;
	int limit;
	int count;

	do
	{
		/* With several scopes, a search costs the same for one as for a batch */
		limit = scopes->isExact ? Min(max, BATCH) : BATCH;
		MemoryContextSwitchTo(batch);
		count = KeyStoreAbandoned(scopes, after, found, limit);
		MemoryContextSwitchTo(each);
		for (int i = 0; i < count && max > 0; i++)
		{
			KeyRecord record;

			request.name = found[i].name;
			after = found[i].token;
			if (ClaimAbandoned(&request, &record))
			{
				PutOperation(rsinfo, &request.name, &record.lease);
				max--;
			}
			MemoryContextReset(each);
		}
		MemoryContextReset(batch);
	} while (count == limit && max > 0);

	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	MemoryContextDelete(batch);
}

/*
 * claim_abandoned(scope, lease, max) RETURNS SETOF abandoned
 */
Datum
idempotency_claim_abandoned(PG_FUNCTION_ARGS)
{
	ScopePattern scopes;
	const Interval *lease;

	PreventUnsafeCall(fcinfo, "idempotency.claim_abandoned()");
	ScopePatternFromArg(fcinfo, &scopes);
	lease = LeaseFromArg(fcinfo, 1);
	if (lease == NULL)
		ErrorBadArgument(
			"lease is missing",
			"Pass the time within which the completer renews the lease, such as '30 seconds'.");
	if (PG_ARGISNULL(2) || PG_GETARG_INT32(2) <= 0)
		ErrorBadArgument("max must be positive",
						 "Pass the maximum number of operations to take over.");
	InitMaterializedSRF(fcinfo, 0);
	CompositeCheck(((ReturnSetInfo *) fcinfo->resultinfo)->setDesc, "abandoned", columnType,
				   ABANDONED_COLUMNS);
	TakeOver((ReturnSetInfo *) fcinfo->resultinfo, &scopes, lease, PG_GETARG_INT32(2));
	return (Datum) 0;
}
