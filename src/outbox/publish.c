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

#include "access/genam.h"
#include "access/relation.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_am.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/rel.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
#include "utils/xid8.h"

#include "base/compat.h"
#include "base/errors.h"
#include "keys/transaction.h"
#include "outbox/outbox.h"
#include "query/reevaluation.h"
#include "query/relation.h"
#include "request/request.h"
#include "server/stats.h"
#include "settings/guc.h"

PG_FUNCTION_INFO_V1(idempotency_publish);

/* The columns of idempotency.outbox, in order. */
enum
{
	OUT_SEQ = 1,
	OUT_TXID,
	OUT_PUBLISHED_AT,
	OUT_ID,
	OUT_BUCKET,
	OUT_BYTES,
	OUT_DELIVER_AT,
	OUT_TOPIC,
	OUT_AGGREGATE,
	OUT_TYPE,
	OUT_PAYLOAD,
	OUT_HEADERS,
	OUTBOX_COLUMNS = OUT_HEADERS
};

static const TableColumn columns[OUTBOX_COLUMNS] = {
	[OUT_SEQ - 1] = {"seq", INT8OID, true},
	[OUT_TXID - 1] = {"txid", XID8OID, true},
	[OUT_PUBLISHED_AT - 1] = {"published_at", TIMESTAMPTZOID, true},
	[OUT_ID - 1] = {"id", UUIDOID, true},
	[OUT_BUCKET - 1] = {"bucket", INT4OID, true},
	[OUT_BYTES - 1] = {"bytes", INT4OID, true},
	[OUT_DELIVER_AT - 1] = {"deliver_at", TIMESTAMPTZOID, false},
	[OUT_TOPIC - 1] = {"aggregatetype", TEXTOID, true},
	[OUT_AGGREGATE - 1] = {"aggregateid", TEXTOID, false},
	[OUT_TYPE - 1] = {"type", TEXTOID, false},
	[OUT_PAYLOAD - 1] = {"payload", JSONOID, false},
	[OUT_HEADERS - 1] = {"headers", JSONOID, false},
};

/*
 * CheckOutbox throws 55000 unless the columns and the primary key are those that the
 * extension made.
 */
static void
CheckOutbox(Relation table)
{
	Oid primaryKey = RelationGetPrimaryKeyIndexCompat(table);
	bool fits = false;

	TableCheckColumns(table, columns, OUTBOX_COLUMNS);
	if (OidIsValid(primaryKey))
	{
		Relation index = index_open(primaryKey, AccessShareLock);

		fits = index->rd_index->indnkeyatts == 1 && index->rd_index->indkey.values[0] == OUT_SEQ &&
			   index->rd_rel->relam == BTREE_AM_OID;
		index_close(index, AccessShareLock);
	}
	if (!fits)
		ErrorStoreAltered("outbox", "Its primary key is not (seq).",
						  "Add PRIMARY KEY (seq) again.");
}

static ExtensionTable OutboxTable = {
	.name = "outbox", .trigger = "refuse_update", .check = CheckOutbox};

/* The arguments of publish(). */
enum
{
	ARG_TOPIC,
	ARG_PAYLOAD,
	ARG_AGGREGATE,
	ARG_TYPE,
	ARG_HEADERS,
	ARG_EVENT_ID,
	ARG_DELIVER_AT
};

/*
 * Insert inserts a row.  "values" lacks the number and the transaction, which are filled
 * here.
 */
static void
Insert(const Datum *values, const bool *isnull)
{
	Relation table = ExtensionTableOpen(&OutboxTable, RowExclusiveLock);
	Relation numbers = ExtensionSequenceOpen("outbox_seq", "Delivery", NULL);
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
 * HasMember tells whether a JSON object has a member of that name at its top level.
 */
static bool
HasMember(text *object, const char *name)
{
	LOCAL_FCINFO(call, 2);

	InitFunctionCallInfoData(*call, NULL, 2, InvalidOid, NULL, NULL);
	call->args[0].value = PointerGetDatum(object);
	call->args[0].isnull = false;
	call->args[1].value = CStringGetTextDatum(name);
	call->args[1].isnull = false;
	(void) json_object_field(call);
	return !call->isnull;
}

/*
 * AddMember adds a member to the JSON object that is being written, unless the caller's
 * headers have a member of that name.
 */
static void
AddMember(StringInfo out, const char *name, const text *value, text *given)
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
	static const char space[] = " \t\r\n";
	text *given = DocumentText(DocumentFromArg(fcinfo, ARG_HEADERS));
	const char *rest = "}"; /* of the caller's object, after its opening brace */
	const text *scope;
	const text *key;
	StringInfoData out;

	if (given != NULL)
	{
		rest = text_to_cstring(given);
		rest += strspn(rest, space);
		if (*rest != '{')
			ErrorBadArgument("headers must be a JSON object",
							 "Pass names and values, such as '{\"trace\": \"a1\"}'.");
		rest++;
		rest += strspn(rest, space);
	}
	if (!LastGrantedClaim(&scope, &key))
		return given;

	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);
	appendStringInfoChar(&out, '{');
	AddMember(&out, "idempotency-scope", scope, given);
	AddMember(&out, "idempotency-key", key, given);
	if (*rest != '}' && out.len > VARHDRSZ + 1)
		appendStringInfoChar(&out, ',');
	appendStringInfoString(&out, rest);
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
 * Bucket returns the hash by which partitions share events: that of the aggregate in UTF-8, which
 * a dump can move to a database of another encoding, and as hashtext() of the portable edition;
 * without an aggregate, that of the id.
 */
static int32
Bucket(const text *aggregate, const pg_uuid_t *id)
{
	const unsigned char *bytes = id->data;
	int length = UUID_LEN;

	if (aggregate != NULL)
		bytes = (const unsigned char *) Utf8OfServerText(VARDATA_ANY(aggregate),
														 VARSIZE_ANY_EXHDR(aggregate), &length);
	return (int32) (hash_bytes(bytes, length) & PG_INT32_MAX);
}

/*
 * CheckedBytes returns the size of payload and headers, which can be NULL.  Throws 54000 if it
 * exceeds idempotency.max_payload_size; if the setting is invalid, which makes every event
 * too large, that is reported instead.
 */
static int32
CheckedBytes(const text *topic, const text *payload, const text *headers)
{
	Size bytes = (payload == NULL ? 0 : VARSIZE_ANY_EXHDR(payload)) +
				 (headers == NULL ? 0 : VARSIZE_ANY_EXHDR(headers));
	int most = SettingNumber(&PayloadSizeSetting, NULL);

	if (bytes > (Size) most)
	{
		RequireSetting(&PayloadSizeSetting, NULL);
		ereport(ERROR, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
						errmsg("event of %zu bytes exceeds idempotency.max_payload_size (%d bytes)",
							   bytes, most),
						errdetail("Topic \"%s\".", text_to_cstring(topic)),
						errhint("Publish a reference to the large part, or raise the limit "
								"with idempotency.configure().")));
	}
	return (int32) bytes;
}

/*
 * publish(topic, payload, aggregate_id, type, headers, event_id, deliver_at) RETURNS uuid:
 * the event's id
 */
Datum
idempotency_publish(PG_FUNCTION_ARGS)
{
	Datum values[OUTBOX_COLUMNS] = {0};
	bool isnull[OUTBOX_COLUMNS] = {false};
	pg_uuid_t *id;
	text *topic;
	text *payload;
	text *headers;

	PreventUnsafeCall(fcinfo, "idempotency.publish()");
	id = PG_ARGISNULL(ARG_EVENT_ID) ? NewUuidV7() : PG_GETARG_UUID_P(ARG_EVENT_ID);
	topic = NameFromArg(fcinfo, ARG_TOPIC, "topic");
	values[OUT_TOPIC - 1] = PointerGetDatum(topic);
	values[OUT_AGGREGATE - 1] =
		OptionalName(fcinfo, ARG_AGGREGATE, "aggregate", &isnull[OUT_AGGREGATE - 1]);
	values[OUT_TYPE - 1] = OptionalName(fcinfo, ARG_TYPE, "type", &isnull[OUT_TYPE - 1]);
	headers = HeadersFromArg(fcinfo);
	payload = DocumentText(DocumentFromArg(fcinfo, ARG_PAYLOAD));
	values[OUT_BYTES - 1] = Int32GetDatum(CheckedBytes(topic, payload, headers));

	values[OUT_PUBLISHED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[OUT_ID - 1] = UUIDPGetDatum(id);
	values[OUT_BUCKET - 1] =
		Int32GetDatum(Bucket((const text *) DatumGetPointer(values[OUT_AGGREGATE - 1]), id));
	isnull[OUT_DELIVER_AT - 1] = PG_ARGISNULL(ARG_DELIVER_AT);
	if (!isnull[OUT_DELIVER_AT - 1])
		values[OUT_DELIVER_AT - 1] = PG_GETARG_DATUM(ARG_DELIVER_AT);
	values[OUT_PAYLOAD - 1] = PointerGetDatum(payload);
	isnull[OUT_PAYLOAD - 1] = payload == NULL;
	values[OUT_HEADERS - 1] = PointerGetDatum(headers);
	isnull[OUT_HEADERS - 1] = headers == NULL;
	Insert(values, isnull);
	Count(COUNT_PUBLISHED);
	EventPublished(topic);
	PG_RETURN_UUID_P(id);
}
