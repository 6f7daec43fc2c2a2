/*-------------------------------------------------------------------------
 *
 * keys/once.c
 *	  once() and once_many(): the inbox of a consumer.
 *
 * An inbox record is a stored outcome without an answer, written at once.  once()
 * locks its key.  once_many() takes row locks only, so that ten thousand keys do not
 * fill the lock table, and inserts in bytewise order, so that two batches cannot
 * deadlock with each other.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "lib/qunique.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "base/errors.h"
#include "keys/claim.h"
#include "keys/lock.h"
#include "keys/transaction.h"
#include "keys/wakeup.h"
#include "query/reevaluation.h"
#include "server/stats.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_once);
PG_FUNCTION_INFO_V1(idempotency_once_many);

/*
 * once(scope, key, retention) RETURNS boolean: true the first time
 */
Datum
idempotency_once(PG_FUNCTION_ARGS)
{
	KeyRecord record = {0};
	KeyVersion seen;
	KeyName name;
	Retention retention;
	bool isNew;

	/* Check the arguments */
	PreventUnsafeCall(fcinfo, "idempotency.once()");
	KeyNameFromArgs(fcinfo, &name);
	retention = RetentionFromArg(fcinfo, 2, name.scope);

	/* Store the record, unless there is one */
	isNew = ClaimAbsent(&name, &seen);
	if (isNew)
	{
		record.expiresAt = RetentionEnd(&retention, GetCurrentTimestamp());
		KeyStoreWrite(&name, &seen, &record);
		Count(COUNT_COMPLETIONS);
		if (ItemPointerIsValid(&seen.tid))
			WakeupAfterCommit(KeyLockNumber(&name)); /* if it was a lease */
	}
	ScopeSetResult(name.scope, name.key, isNew);
	PG_RETURN_BOOL(isNew);
}

static int
CompareKeys(const void *a, const void *b)
{
	const text *left = ((const KeyName *) a)->key;
	const text *right = ((const KeyName *) b)->key;
	int leftBytes = VARSIZE_ANY_EXHDR(left);
	int rightBytes = VARSIZE_ANY_EXHDR(right);
	int order = memcmp(VARDATA_ANY(left), VARDATA_ANY(right), Min(leftBytes, rightBytes));

	return order != 0 ? order : leftBytes - rightBytes;
}

/*
 * NamesFromArray returns the names of the keys in "array", checked, in bytewise order,
 * without duplicates.  Throws IK400 for an invalid key, and 2202E for an array of
 * several dimensions.
 */
static KeyName *
NamesFromArray(text *scope, ArrayType *array, int *count)
{
	Datum *keys;
	bool *nulls;
	int given;
	KeyName *names;

	if (ARR_NDIM(array) > 1)
		ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
						errmsg("idempotency keys must be an array of one dimension"),
						errhint("Flatten the array, for instance with unnest().")));

	/* idempotency.identifier, which is stored as text */
	deconstruct_array(array, ARR_ELEMTYPE(array), -1, false, TYPALIGN_INT, &keys, &nulls, &given);
	names = palloc(Max(given, 1) * sizeof(KeyName));
	for (int i = 0; i < given; i++)
	{
		if (nulls[i])
			ErrorNameMissing("key");
		names[i] = (KeyName){.scope = scope, .key = DatumGetTextPP(keys[i])};
		CheckName(names[i].key, "key");
	}
	qsort(names, given, sizeof(KeyName), CompareKeys);

	*count = qunique(names, given, sizeof(KeyName), CompareKeys);
	return names;
}

/*
 * RefuseMine throws IK409 if this transaction owns the operation.
 */
static void
RefuseMine(const KeyName *name)
{
	KeyRecord record = {0};
	KeyVersion seen;

	if (AnyTokenPassed())
		(void) KeyStoreProbe(name, &record, &seen);
	if (OperationIsMine(name, record.lease.token))
		ErrorClaimedHere(name);
}

/*
 * once_many(scope, keys, retention) RETURNS SETOF text: the keys that are new, in
 * bytewise order
 */
Datum
idempotency_once_many(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	KeyStoreBatch *batch;
	Retention retention;
	KeyName *names;
	text *scope;
	int count;
	int fresh = 0;

	/* Check the arguments, and sort the keys */
	PreventUnsafeCall(fcinfo, "idempotency.once_many()");
	scope = ScopeFromArg(fcinfo);
	retention = RetentionFromArg(fcinfo, 2, scope);
	if (PG_ARGISNULL(1))
		ErrorNameMissing("key");
	names = NamesFromArray(scope, PG_GETARG_ARRAYTYPE_P(1), &count);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);

	/* Insert them, and return the new ones */
	batch = KeyStoreBatchBegin();
	for (int i = 0; i < count; i++)
	{
		RefuseMine(&names[i]);
		if (KeyStoreBatchInsert(batch, &names[i], &retention))
		{
			Datum key = PointerGetDatum(names[i].key);
			bool isnull = false;

			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, &key, &isnull);
			fresh++;
		}
	}
	KeyStoreBatchEnd(batch);

	/* Count, and record the result */
	CountEvents(COUNT_CLAIMS, fresh);
	CountEvents(COUNT_COMPLETIONS, fresh);
	CountEvents(COUNT_REPLAYS, count - fresh);
	if (count > 0)
		ScopeSetResult(scope, NULL, fresh > 0);
	return (Datum) 0;
}
