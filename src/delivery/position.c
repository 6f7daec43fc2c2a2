/*-------------------------------------------------------------------------
 *
 * delivery/position.c
 *	  The table idempotency.position: how far each subscription has come, and which
 *	  batch is out.
 *
 * Each subscription has one row.  A change gives the row the next version, which is part
 * of the primary key, and a reader takes the highest.  So a reader does not pass over
 * dead versions that an old snapshot elsewhere keeps.
 *
 * A row has its origin: the system identifier, and the OID of the outbox.  The
 * transactions in a row that was restored or replicated are another cluster's, and have
 * ended.
 *
 * Locks: the caller holds the subscription's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/errors.h"
#include "base/query.h"
#include "base/relation.h"
#include "delivery/position.h"
#include "outbox/table.h"

/* The columns that a change sets, in the order of their parameters from $3 on. */
#define CHANGED                                                                                              \
	"passed, inflight, batch, batch_passed, batch_inflight, batch_parked, leased_at, leased_until, singles," \
	" system_identifier, relation"

enum
{
	P_SUBSCRIPTION,
	P_VERSION,
	P_PASSED,
	P_INFLIGHT,
	P_BATCH,
	P_BATCH_PASSED,
	P_BATCH_INFLIGHT,
	P_BATCH_PARKED,
	P_LEASED_AT,
	P_LEASED_UNTIL,
	P_SINGLES,
	P_SYSTEM_IDENTIFIER,
	P_RELATION,
	POSITION_COLUMNS
};

#define POSITION_TYPES                                                                             \
	{                                                                                              \
		TEXTOID, INT8OID, INT8OID, INT8ARRAYOID, INT8OID, INT8OID, INT8ARRAYOID, INT8ARRAYOID,     \
			TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID, INT8OID, OIDOID                               \
	}

static ExtensionQuery readQuery = {
	.table = "position",
	.text = "SELECT subscription, version, " CHANGED " FROM idempotency.position"
			" WHERE subscription OPERATOR(pg_catalog.=) $1 ORDER BY version DESC LIMIT 1",
	.parameters = 1,
	.types = {TEXTOID},
	.results = POSITION_TYPES,
};

static ExtensionQuery createQuery = {
	.table = "position",
	.text = "INSERT INTO idempotency.position (subscription, version, " CHANGED ")"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
	.parameters = POSITION_COLUMNS,
	.types = POSITION_TYPES,
};

static ExtensionQuery writeQuery = {
	.table = "position",
	.text = "UPDATE idempotency.position SET (version, " CHANGED ") ="
			" ROW ($2 OPERATOR(pg_catalog.+) 1, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
			" WHERE subscription OPERATOR(pg_catalog.=) $1 AND version OPERATOR(pg_catalog.=) $2",
	.parameters = POSITION_COLUMNS,
	.types = POSITION_TYPES,
};

static ExtensionQuery lockQuery = {
	.table = "position",
	.text = "SELECT FROM idempotency.position WHERE subscription OPERATOR(pg_catalog.=) $1"
			" FOR UPDATE SKIP LOCKED",
	.parameters = 1,
	.types = {TEXTOID},
};

/*
 * CheckNumbers throws 55000 if a position of another cluster is ahead of the sequence, so
 * that events that are published now would count as delivered: logical replication, for
 * one, does not copy sequences.
 */
static void
CheckNumbers(const text *subscription, const Position *position)
{
	int64 ahead = Max(position->start.passed, position->batch != 0 ? position->end.passed : 0);
	int64 last = OutboxLastNumber();

	if (ahead > last)
		ereport(
			ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("sequence idempotency.outbox_seq is behind subscription \"%s\"",
					text_to_cstring(subscription)),
			 errdetail("The subscription came from elsewhere and has passed event %lld; the last "
					   "number given out here is %lld.",
					   (long long) ahead, (long long) last),
			 errhint(
				 "Before anything is published, use SELECT "
				 "setval('idempotency.outbox_seq', ...) with the last number of the server that "
				 "the rows came from.")));
}

/*
 * PositionRead fills "position", in the current memory context.  Returns false if the
 * subscription has none.  Throws 55000 if its numbers are impossible here.
 */
bool
PositionRead(const text *subscription, Position *position)
{
	MemoryContext caller = CurrentMemoryContext;
	Datum values[POSITION_COLUMNS] = {PointerGetDatum(subscription)};
	bool idle = false; /* no batch is out */
	bool found = ExtensionQueryRun(&readQuery, values, NULL) > 0;
	bool ours = true;

	if (found)
	{
		MemoryContext spi = MemoryContextSwitchTo(caller);

		for (int i = 0; i < POSITION_COLUMNS; i++)
		{
			bool ofBatch = i >= P_BATCH && i <= P_LEASED_UNTIL;
			bool isnull;

			values[i] = ExtensionQueryValue(&readQuery, 0, i + 1,
											i == P_BATCH || (ofBatch && idle) ? &isnull : NULL);
			if (i == P_BATCH)
				idle = isnull;
		}
		memset(position, 0, sizeof(Position));
		position->version = DatumGetInt64(values[P_VERSION]);
		position->singles = DatumGetInt32(values[P_SINGLES]);
		CursorFromArray(&position->start, DatumGetInt64(values[P_PASSED]),
						DatumGetArrayTypePCopy(values[P_INFLIGHT]));
		if (!idle)
		{
			position->batch = DatumGetInt64(values[P_BATCH]);
			position->leasedAt = DatumGetTimestampTz(values[P_LEASED_AT]);
			position->leasedUntil = DatumGetTimestampTz(values[P_LEASED_UNTIL]);
			CursorFromArray(&position->end, DatumGetInt64(values[P_BATCH_PASSED]),
							DatumGetArrayTypePCopy(values[P_BATCH_INFLIGHT]));
			position->parked = NumbersFromArray(DatumGetArrayTypePCopy(values[P_BATCH_PARKED]), 1,
												&position->parkedCount);
		}
		/* A row that was restored or replicated is another cluster's */
		ours = DatumGetInt64(values[P_SYSTEM_IDENTIFIER]) == (int64) GetSystemIdentifier() &&
			   DatumGetObjectId(values[P_RELATION]) == ExtensionRelationOid("outbox");
		if (!ours)
		{
			CursorAdopt(&position->start);
			CursorAdopt(&position->end);
		}
		MemoryContextSwitchTo(spi);
	}
	ExtensionQueryEnd();
	if (!ours)
		CheckNumbers(subscription, position);
	return found;
}

/*
 * PositionIsLeased tells whether a batch is out whose lease has not ended.
 */
bool
PositionIsLeased(const Position *position)
{
	TimestampTz now = GetCurrentTimestamp();

	return position->batch != 0 && now >= position->leasedAt && now <= position->leasedUntil;
}

/*
 * ToValues fills the parameters of a query that writes.
 */
static void
ToValues(const text *subscription, const Position *position, Datum *values, bool *isnull)
{
	memset(isnull, 0, POSITION_COLUMNS * sizeof(bool));
	values[P_SUBSCRIPTION] = PointerGetDatum(subscription);
	values[P_VERSION] = Int64GetDatum(position->version);
	values[P_PASSED] = Int64GetDatum(position->start.passed);
	values[P_INFLIGHT] = PointerGetDatum(CursorToArray(&position->start));
	values[P_SINGLES] = Int32GetDatum(position->singles);
	values[P_SYSTEM_IDENTIFIER] = Int64GetDatum((int64) GetSystemIdentifier());
	values[P_RELATION] = ObjectIdGetDatum(ExtensionRelationOid("outbox"));
	if (position->batch == 0)
	{
		for (int i = P_BATCH; i <= P_LEASED_UNTIL; i++)
			isnull[i] = true;
		return;
	}
	values[P_BATCH] = Int64GetDatum(position->batch);
	values[P_BATCH_PASSED] = Int64GetDatum(position->end.passed);
	values[P_BATCH_INFLIGHT] = PointerGetDatum(CursorToArray(&position->end));
	values[P_BATCH_PARKED] =
		PointerGetDatum(NumbersToArray(position->parked, position->parkedCount));
	values[P_LEASED_AT] = TimestampTzGetDatum(position->leasedAt);
	values[P_LEASED_UNTIL] = TimestampTzGetDatum(position->leasedUntil);
}

/*
 * PositionCreate gives a new subscription its position.  Its versions begin after those
 * of an earlier subscription of the same name.
 */
void
PositionCreate(const text *subscription, const OutboxCursor *start)
{
	Position position = {.start = *start, .version = GetCurrentTimestamp()};
	Datum values[POSITION_COLUMNS];
	bool isnull[POSITION_COLUMNS];

	ToValues(subscription, &position, values, isnull);
	(void) ExtensionQueryDo(&createQuery, values, isnull);
}

/*
 * PositionWrite writes a position that was read, as its next version.  Throws 40001 if it
 * was changed since, which the subscription's lock prevents.
 */
void
PositionWrite(const text *subscription, Position *position)
{
	Datum values[POSITION_COLUMNS];
	bool isnull[POSITION_COLUMNS];

	ToValues(subscription, position, values, isnull);
	if (ExtensionQueryDo(&writeQuery, values, isnull) != 1)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("position of a subscription was changed by a concurrent transaction"),
				 errdetail("Subscription \"%s\".", text_to_cstring(subscription)),
				 errhint("Retry the transaction.")));
	position->version++;
}

/*
 * PositionLock locks the row of a position, to the end of the transaction.  Returns false,
 * without waiting, if an administrator's session has locked it, or there is none.
 */
bool
PositionLock(const text *subscription)
{
	Datum values[] = {PointerGetDatum(subscription)};

	return ExtensionQueryDo(&lockQuery, values, NULL) > 0;
}
