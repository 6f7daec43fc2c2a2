/*-------------------------------------------------------------------------
 *
 * outbox/event.c
 *	  One event as it is delivered: the composite idempotency.event.
 *
 * Takes no locks, reads no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/name.h"
#include "base/relation.h"
#include "outbox/event.h"
#include "outbox/table.h"

/* The column of the outbox for each attribute; 0: none. */
static const int outboxColumn[EVENT_COLUMNS] = {
	[EVENT_SEQ] = OUT_SEQ,		   [EVENT_ID] = OUT_ID,
	[EVENT_TOPIC] = OUT_TOPIC,	   [EVENT_AGGREGATE] = OUT_AGGREGATE,
	[EVENT_TYPE] = OUT_TYPE,	   [EVENT_PAYLOAD] = OUT_PAYLOAD,
	[EVENT_HEADERS] = OUT_HEADERS, [EVENT_PUBLISHED_AT] = OUT_PUBLISHED_AT,
};

static const Oid attributeType[EVENT_COLUMNS] = {
	[EVENT_BATCH] = INT8OID,	 [EVENT_SEQ] = INT8OID,
	[EVENT_ID] = UUIDOID,		 [EVENT_TOPIC] = TEXTOID,
	[EVENT_AGGREGATE] = TEXTOID, [EVENT_TYPE] = TEXTOID,
	[EVENT_PAYLOAD] = JSONOID,	 [EVENT_HEADERS] = JSONOID,
	[EVENT_ATTEMPT] = INT4OID,	 [EVENT_PUBLISHED_AT] = TIMESTAMPTZOID,
};

/*
 * CopyAttribute copies a value that is passed by reference into the current
 * memory context, whole.
 */
static Datum
CopyAttribute(int attribute, Datum value)
{
	switch (attribute)
	{
		case EVENT_ID:
			return PointerGetDatum(memcpy(palloc(UUID_LEN), DatumGetPointer(value), UUID_LEN));
		case EVENT_TOPIC:
		case EVENT_AGGREGATE:
		case EVENT_TYPE:
		case EVENT_PAYLOAD:
		case EVENT_HEADERS:
			return PointerGetDatum(PG_DETOAST_DATUM_COPY(value));
		case EVENT_ATTEMPT:
			return value;
		default: /* a server of 32 bits passes these by reference */
			return Int64GetDatum(DatumGetInt64(value));
	}
}

/*
 * EventCopy copies an event into the current memory context.
 */
Event *
EventCopy(const Datum *values, const bool *isnull)
{
	Event *event = palloc(sizeof(Event));

	for (int i = 0; i < EVENT_COLUMNS; i++)
	{
		event->isnull[i] = isnull[i];
		event->values[i] = isnull[i] ? (Datum) 0 : CopyAttribute(i, values[i]);
	}
	return event;
}

/*
 * EventFromOutbox returns a copy of the event in the slot, for a batch.
 */
Event *
EventFromOutbox(TupleTableSlot *slot, int64 batch)
{
	Datum values[EVENT_COLUMNS];
	bool isnull[EVENT_COLUMNS] = {false};

	for (int i = 0; i < EVENT_COLUMNS; i++)
	{
		if (outboxColumn[i] != 0)
			values[i] = slot_getattr(slot, outboxColumn[i], &isnull[i]);
	}
	values[EVENT_BATCH] = Int64GetDatum(batch);
	values[EVENT_ATTEMPT] = Int32GetDatum(1);
	return EventCopy(values, isnull);
}

int64
EventSeq(const Event *event)
{
	return DatumGetInt64(event->values[EVENT_SEQ]);
}

/*
 * EventsShareAggregate tells whether two events belong to the same aggregate.
 */
bool
EventsShareAggregate(const Event *a, const Event *b)
{
	return !a->isnull[EVENT_AGGREGATE] && !b->isnull[EVENT_AGGREGATE] &&
		   TextEquals(DatumGetTextPP(a->values[EVENT_AGGREGATE]),
					  DatumGetTextPP(b->values[EVENT_AGGREGATE]));
}

/*
 * EventType returns the OID of idempotency.event.  Throws 55000 where the
 * extension is not installed.
 */
Oid
EventType(void)
{
	Oid schema = get_namespace_oid("idempotency", true);
	Oid type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("event"),
							   ObjectIdGetDatum(schema));

	if (!OidIsValid(type))
		ErrorNotInstalled();
	return type;
}

/*
 * EventCheckRow throws 42804 unless a row has the attributes that the library fills.
 */
void
EventCheckRow(TupleDesc desc)
{
	CompositeCheck(desc, "event", attributeType, EVENT_COLUMNS);
}

/*
 * EventRowType returns the attributes of idempotency.event, to be released.  Throws 42804 if
 * they are not those that the library fills.
 */
TupleDesc
EventRowType(void)
{
	TupleDesc desc = lookup_rowtype_tupdesc(EventType(), -1);

	EventCheckRow(desc);
	return desc;
}

/*
 * EventDatum returns the event as a composite, in the current memory context.
 */
Datum
EventDatum(const Event *event)
{
	TupleDesc desc = EventRowType();
	Datum result = HeapTupleGetDatum(heap_form_tuple(desc, unconstify(Datum *, &event->values[0]),
													 unconstify(bool *, &event->isnull[0])));

	ReleaseTupleDesc(desc);
	return result;
}
