/*-------------------------------------------------------------------------
 *
 * store/row.c
 *	  The layout of a row of idempotency.key.
 *
 * A row without a lease is stored without the columns of leases, which come last;
 * the server reads missing columns as NULL.  With at most eight columns the null
 * bitmap fits into the header's padding, so that leases cost other rows nothing.
 * (A row that the server itself forms, for an out-of-line value or in VACUUM FULL,
 * has all columns.)
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "store/row.h"

/* The first columns, those of a row without a lease. */
static TupleDesc outcomeDesc = NULL;

/*
 * KeyRowPrepare copies the first columns of the table's descriptor, for KeyRowFill().
 */
void
KeyRowPrepare(TupleDesc desc)
{
	MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);
	TupleDesc outgoing = outcomeDesc;

	outcomeDesc = NULL;
	if (outgoing != NULL)
		FreeTupleDesc(outgoing);
	outgoing = CreateTemplateTupleDesc(OUTCOME_COLUMNS);
	for (int column = 1; column <= OUTCOME_COLUMNS; column++)
		TupleDescCopyEntry(outgoing, column, desc, column);
	outcomeDesc = outgoing;
	MemoryContextSwitchTo(caller);
}

/* ----------------------------------------------------------------
 * Reading
 * ----------------------------------------------------------------
 */

/*
 * KeyRowTime returns a time, of a column that is not NULL.
 */
TimestampTz
KeyRowTime(TupleTableSlot *slot, int column)
{
	bool isnull;

	return DatumGetTimestampTz(slot_getattr(slot, column, &isnull));
}

/*
 * GetVarlena returns a detoasted copy of a varlena column, or NULL.
 */
static void *
GetVarlena(TupleTableSlot *slot, int column)
{
	bool isnull;
	Datum value = slot_getattr(slot, column, &isnull);

	return isnull ? NULL : PG_DETOAST_DATUM_COPY(value);
}

/*
 * KeyRowIsExpired tells whether a row counts as absent at a time.
 */
bool
KeyRowIsExpired(TupleTableSlot *slot, TimestampTz now)
{
	return KeyRowTime(slot, COL_EXPIRES_AT) <= now;
}

/*
 * KeyRowState returns the state of an operation now.
 */
KeyState
KeyRowState(TupleTableSlot *slot)
{
	TimestampTz now;
	bool isnull;

	if (KeyRowIsExpired(slot, GetCurrentTimestamp()))
		return KEY_EXPIRED;
	(void) slot_getattr(slot, COL_TOKEN, &isnull);
	if (isnull)
		return KEY_STORED;
	now = GetCurrentTimestamp();
	return LeaseRuns(KeyRowTime(slot, COL_LEASED_AT), KeyRowTime(slot, COL_LEASED_UNTIL), now)
			   ? KEY_LEASED
			   : KEY_ABANDONED;
}

/*
 * KeyRowToken returns the token of the lease in a row, or 0.
 */
int64
KeyRowToken(TupleTableSlot *slot)
{
	bool isnull;
	Datum token = slot_getattr(slot, COL_TOKEN, &isnull);

	return isnull ? 0 : DatumGetInt64(token);
}

/*
 * KeyRowName copies the name in a row into the current memory context.
 */
void
KeyRowName(TupleTableSlot *slot, KeyName *name)
{
	*name = (KeyName){.scope = GetVarlena(slot, COL_SCOPE),
					  .key = KeyTextUnpack(GetVarlena(slot, COL_KEY))};
}

/*
 * KeyRowIsOf tells whether a row is that of "name", for a row that was found by its TID.
 */
bool
KeyRowIsOf(TupleTableSlot *slot, const KeyName *name)
{
	KeyName found;

	KeyRowName(slot, &found);
	return KeyNameEquals(&found, name);
}

/*
 * KeyRowIsIn tells whether a pattern matches the scope of a row.
 */
bool
KeyRowIsIn(TupleTableSlot *slot, const ScopePattern *scopes)
{
	bool isnull;
	text *scope = DatumGetTextPP(slot_getattr(slot, COL_SCOPE, &isnull));

	return scopes->isExact || PatternMatches(scopes->pattern, scope);
}

static void
ReadLease(TupleTableSlot *slot, Lease *lease)
{
	bool isnull;
	Datum value = slot_getattr(slot, COL_TOKEN, &isnull);

	memset(lease, 0, sizeof(Lease));
	if (isnull)
		return;
	lease->token = DatumGetInt64(value);
	lease->attempt = DatumGetInt32(slot_getattr(slot, COL_ATTEMPT, &isnull));
	lease->from = KeyRowTime(slot, COL_LEASED_AT);
	lease->until = KeyRowTime(slot, COL_LEASED_UNTIL);
	lease->recoveryPoint = GetVarlena(slot, COL_RECOVERY_POINT);
	lease->state = GetVarlena(slot, COL_RECOVERY_STATE);
	lease->request = GetVarlena(slot, COL_REQUEST);
	value = slot_getattr(slot, COL_RETENTION, &isnull);
	lease->retention.forever = isnull;
	if (!isnull)
		lease->retention.length = *DatumGetIntervalP(value);
}

/*
 * KeyRowRead copies a row into the current memory context.
 */
void
KeyRowRead(TupleTableSlot *slot, KeyRecord *record)
{
	bool isnull;
	int16 status = DatumGetInt16(slot_getattr(slot, COL_STATUS, &isnull));

	record->expiresAt = KeyRowTime(slot, COL_EXPIRES_AT);
	record->hasStatus = !isnull;
	record->failed = status < 0;
	record->status = abs(status);
	record->fingerprint = GetVarlena(slot, COL_FINGERPRINT);
	record->headers = GetVarlena(slot, COL_HEADERS);
	record->response = GetVarlena(slot, COL_RESPONSE);
	record->finishedBy = DatumGetInt64(slot_getattr(slot, COL_FINISHED_BY, &isnull));
	ReadLease(slot, &record->lease);
}

/* ----------------------------------------------------------------
 * Versions
 * ----------------------------------------------------------------
 */

/*
 * KeyRowIsOwn tells whether this transaction wrote the row version in "slot".  A frozen
 * row keeps the number of its transaction, which another one can have 2^32 numbers later;
 * HeapTupleHeaderGetXmin() hides it.
 */
bool
KeyRowIsOwn(TupleTableSlot *slot)
{
	HeapTuple tuple = ExecFetchSlotHeapTuple(slot, false, NULL);

	return TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data));
}

/*
 * KeyRowCheckSnapshot throws 40001 if the transaction's snapshot is fixed and does
 * not show the row version in "slot", unless this transaction wrote it.
 */
void
KeyRowCheckSnapshot(Relation table, const KeyName *name, TupleTableSlot *slot)
{
	if (!IsolationUsesXactSnapshot() || KeyRowIsOwn(slot))
		return;
	if (!table_tuple_satisfies_snapshot(table, slot, GetTransactionSnapshot()))
		ErrorConcurrentChange(name);
}

/* ----------------------------------------------------------------
 * Writing
 * ----------------------------------------------------------------
 */

static void
Set(TupleTableSlot *slot, int column, Datum value)
{
	slot->tts_values[column - 1] = value;
	slot->tts_isnull[column - 1] = false;
}

static void
SetPointer(TupleTableSlot *slot, int column, const void *value)
{
	slot->tts_values[column - 1] = PointerGetDatum(value);
	slot->tts_isnull[column - 1] = value == NULL;
}

static void
SetLease(TupleTableSlot *slot, const KeyRecord *record, int parts)
{
	const Lease *lease = &record->lease;

	if (parts & LEASE_OWNER)
	{
		Set(slot, COL_TOKEN, Int64GetDatum(lease->token));
		Set(slot, COL_ATTEMPT, Int32GetDatum(lease->attempt));
		SetPointer(slot, COL_RETENTION, lease->retention.forever ? NULL : &lease->retention.length);
	}
	if (parts & LEASE_TIMES)
	{
		Set(slot, COL_LEASED_AT, TimestampTzGetDatum(lease->from));
		Set(slot, COL_LEASED_UNTIL, TimestampTzGetDatum(lease->until));
		Set(slot, COL_EXPIRES_AT, TimestampTzGetDatum(record->expiresAt));
	}
	if (parts & LEASE_CHECKPOINT)
	{
		SetPointer(slot, COL_RECOVERY_POINT, lease->recoveryPoint);
		SetPointer(slot, COL_RECOVERY_STATE, lease->state);
	}
	if (parts & LEASE_REQUEST)
	{
		SetPointer(slot, COL_FINGERPRINT, record->fingerprint);
		SetPointer(slot, COL_REQUEST, lease->request);
	}
}

/*
 * KeyRowFill makes the slot a row that stores "record" under "name": an outcome, with
 * or without the token that finished it, or a lease in progress.  "createdAt" is 0 for a
 * new operation.
 */
void
KeyRowFill(TupleTableSlot *slot, const KeyName *name, const KeyRecord *record,
		   TimestampTz createdAt)
{
	TimestampTz created = createdAt != 0 ? createdAt : GetCurrentTimestamp();

	ExecClearTuple(slot);
	memset(slot->tts_isnull, true, slot->tts_tupleDescriptor->natts * sizeof(bool));
	Set(slot, COL_CREATED_AT, TimestampTzGetDatum(created));
	Set(slot, COL_EXPIRES_AT, TimestampTzGetDatum(record->expiresAt));
	if (record->hasStatus)
		Set(slot, COL_STATUS, Int16GetDatum(record->failed ? -record->status : record->status));
	SetPointer(slot, COL_SCOPE, name->scope);
	SetPointer(slot, COL_KEY, KeyTextPack(name->key));
	SetPointer(slot, COL_FINGERPRINT, record->fingerprint);
	SetPointer(slot, COL_RESPONSE, record->response);
	SetPointer(slot, COL_HEADERS, record->headers);
	if (record->lease.token != 0)
		SetLease(slot, record, LEASE_OWNER | LEASE_TIMES | LEASE_CHECKPOINT | LEASE_REQUEST);
	else if (record->finishedBy != 0)
		Set(slot, COL_FINISHED_BY, Int64GetDatum(record->finishedBy));
	else
	{
		/* a row of the first columns only */
		ExecForceStoreHeapTuple(heap_form_tuple(outcomeDesc, slot->tts_values, slot->tts_isnull),
								slot, true);
		return;
	}
	ExecStoreVirtualTuple(slot);
}

/*
 * KeyRowChange makes "slot" the row in "old" with some parts of its lease changed.
 * Out-of-line values stay where they are.  "old" must stay unchanged until the row is
 * written.
 */
void
KeyRowChange(TupleTableSlot *slot, TupleTableSlot *old, const KeyRecord *record, int parts)
{
	int columns = slot->tts_tupleDescriptor->natts;

	slot_getallattrs(old);
	ExecClearTuple(slot);
	memcpy(slot->tts_values, old->tts_values, columns * sizeof(Datum));
	memcpy(slot->tts_isnull, old->tts_isnull, columns * sizeof(bool));
	SetLease(slot, record, parts);
	ExecStoreVirtualTuple(slot);
}
