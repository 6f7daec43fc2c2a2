/*-------------------------------------------------------------------------
 *
 * outbox/publish.c
 *	  publish(): insert an event that is delivered if the transaction commits.
 *
 * One row, one index entry.  Delivery relies on the order of the steps (README.md): the
 * transaction has its id, and the indexes are locked, before the number is drawn; the
 * indexes stay locked until the entry is inserted.
 *
 * Locks: ROW EXCLUSIVE on the table and the sequence, to the end of the transaction; on
 * the indexes, to the end of the call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "commands/sequence.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/json.h"
#include "utils/rel.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
#include "utils/xid8.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/stats.h"
#include "base/wakeup.h"
#include "keys/transaction.h"
#include "outbox/notify.h"
#include "outbox/table.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_publish);

OutboxCallbacks OutboxNotify;

/* The arguments of publish(). */
enum
{
	ARG_TOPIC,
	ARG_PAYLOAD,
	ARG_AGGREGATE,
	ARG_TYPE,
	ARG_HEADERS,
	ARG_EVENT_ID
};

/*
 * Insert inserts a row.  "values" lacks the number and the transaction, which are filled
 * here.
 */
static void
Insert(const Datum *values, const bool *isnull)
{
	Relation table = OutboxTableOpen(RowExclusiveLock);
	Relation numbers = ExtensionSequenceOpen("outbox_seq", "Delivery");
	FullTransactionId txid = GetTopFullTransactionId();
	EState *estate = CreateExecutorState();
	ResultRelInfo *relinfo = makeNode(ResultRelInfo);
	TupleTableSlot *slot = table_slot_create(table, NULL);

	/* Lock the indexes before drawing a number */
	InitResultRelInfo(relinfo, table, 0, NULL, 0);
	ExecOpenIndices(relinfo, false);

	/* Fill the row */
	ExecClearTuple(slot);
	memcpy(slot->tts_values, values, OUTBOX_COLUMNS * sizeof(Datum));
	memset(slot->tts_isnull, true, slot->tts_tupleDescriptor->natts * sizeof(bool));
	memcpy(slot->tts_isnull, isnull, OUTBOX_COLUMNS * sizeof(bool));
	slot->tts_values[OUT_TXID - 1] = FullTransactionIdGetDatum(txid);
	InjectionPoint("publish-number");
	slot->tts_values[OUT_SEQ - 1] =
		Int64GetDatum(nextval_internal(RelationGetRelid(numbers), false));

	/* Insert the row and its index entries */
	InjectionPoint("publish-insert");
	ExecStoreVirtualTuple(slot);
	table_tuple_insert(table, slot, GetCurrentCommandId(true), 0, NULL);
	InjectionPoint("publish-index");
	ExecInsertIndexTuplesCompat(relinfo, slot, estate, false, false, NULL, NIL, false);
	InjectionPoint("publish-end");

	/* Unlock the indexes */
	ExecDropSingleTupleTableSlot(slot);
	ExecCloseIndices(relinfo);
	FreeExecutorState(estate);
	pfree(relinfo);
	relation_close(numbers, NoLock);
	table_close(table, NoLock);
}

/*
 * Trim moves both ends of a JSON text inwards over white space.
 */
static void
Trim(const char **from, const char **end)
{
	while (*from < *end && strchr(" \t\r\n", **from) != NULL)
		(*from)++;
	while (*from < *end && strchr(" \t\r\n", (*end)[-1]) != NULL)
		(*end)--;
}

/*
 * HasMember tells whether a JSON object has a member of that name at its top level.  A
 * name that is written with escapes is not recognized: the object then has two such
 * members, and the caller's is the last.
 */
static bool
HasMember(const char *object, const char *name)
{
	size_t length = strlen(name);
	int depth = 0;

	for (const char *at = object; *at != '\0'; at++)
	{
		const char *string = at + 1;

		if (*at == '{' || *at == '[')
			depth++;
		else if (*at == '}' || *at == ']')
			depth--;
		if (*at != '"')
			continue;

		for (at = string; *at != '"'; at++)
		{
			if (*at == '\\')
				at++;
		}
		if (depth == 1 && (size_t) (at - string) == length && memcmp(string, name, length) == 0 &&
			at[1 + strspn(at + 1, " \t\r\n")] == ':')
			return true;
	}
	return false;
}

/*
 * AddMember adds a member to the JSON object that is being written, unless the caller's
 * headers have a member of that name.
 */
static void
AddMember(StringInfo out, const char *name, const text *value, const char *given)
{
	if (given != NULL && HasMember(given, name))
		return;
	if (out->len > VARHDRSZ + 1)
		appendStringInfoChar(out, ',');
	appendStringInfo(out, "\"%s\":", name);
	escape_json(out, text_to_cstring(value));
}

/*
 * HeadersFromArg returns the caller's headers with the scope and the key of the claim
 * under which the event is published; NULL if there are neither.  Throws 22023 if the
 * headers are not a JSON object.
 */
static text *
HeadersFromArg(FunctionCallInfo fcinfo)
{
	text *given = DocumentText(DocumentFromArg(fcinfo, ARG_HEADERS));
	char *object = given != NULL ? text_to_cstring(given) : NULL;
	const char *from = object;
	const char *end = object != NULL ? object + strlen(object) : NULL;
	const text *scope;
	const text *key;
	StringInfoData out;

	if (object != NULL)
	{
		Trim(&from, &end);
		if (*from != '{')
			ErrorBadArgument("headers must be a JSON object",
							 "Pass names and values, such as '{\"trace\": \"a1\"}'.");
		from++;
		end--;
		Trim(&from, &end);
	}
	if (!LastGrantedClaim(&scope, &key))
		return given;

	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);
	appendStringInfoChar(&out, '{');
	AddMember(&out, "idempotency-scope", scope, object);
	AddMember(&out, "idempotency-key", key, object);
	if (from < end)
	{
		if (out.len > VARHDRSZ + 1)
			appendStringInfoChar(&out, ',');
		appendBinaryStringInfo(&out, from, end - from);
	}
	appendStringInfoChar(&out, '}');
	SET_VARSIZE(out.data, out.len);
	return (text *) out.data;
}

/*
 * OptionalName returns a text that can be NULL, but not empty or too long.
 */
static Datum
OptionalName(FunctionCallInfo fcinfo, int arg, const char *what, bool *isnull)
{
	*isnull = PG_ARGISNULL(arg);
	return *isnull ? (Datum) 0 : PointerGetDatum(NameFromArg(fcinfo, arg, what));
}

/*
 * publish(topic, payload, aggregate_id, type, headers, event_id) RETURNS uuid:
 * the event's id
 */
Datum
idempotency_publish(PG_FUNCTION_ARGS)
{
	Datum values[OUTBOX_COLUMNS] = {0};
	bool isnull[OUTBOX_COLUMNS] = {false};
	pg_uuid_t *id = PG_ARGISNULL(ARG_EVENT_ID) ? NewUuidV7() : PG_GETARG_UUID_P(ARG_EVENT_ID);
	text *headers;

	values[OUT_TOPIC - 1] = PointerGetDatum(NameFromArg(fcinfo, ARG_TOPIC, "topic"));
	values[OUT_AGGREGATE - 1] =
		OptionalName(fcinfo, ARG_AGGREGATE, "aggregate", &isnull[OUT_AGGREGATE - 1]);
	values[OUT_TYPE - 1] = OptionalName(fcinfo, ARG_TYPE, "type", &isnull[OUT_TYPE - 1]);
	headers = HeadersFromArg(fcinfo);
	PreventCommandIfReadOnly("idempotency.publish()");

	values[OUT_PUBLISHED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[OUT_ID - 1] = UUIDPGetDatum(id);
	values[OUT_PAYLOAD - 1] = PointerGetDatum(DocumentText(DocumentFromArg(fcinfo, ARG_PAYLOAD)));
	isnull[OUT_PAYLOAD - 1] = PG_ARGISNULL(ARG_PAYLOAD);
	values[OUT_HEADERS - 1] = PointerGetDatum(headers);
	isnull[OUT_HEADERS - 1] = headers == NULL;
	Insert(values, isnull);
	CountEvent(COUNT_PUBLISHED);
	WakeupAfterCommit(OutboxChannel());
	OutboxNotify.published(DatumGetTextPP(values[OUT_TOPIC - 1]));
	PG_RETURN_UUID_P(id);
}
