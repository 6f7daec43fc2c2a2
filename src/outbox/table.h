/*-------------------------------------------------------------------------
 *
 * outbox/table.h
 *	  The table idempotency.outbox: its columns, and finding it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_TABLE_H
#define IDEMPOTENCY_OUTBOX_TABLE_H

#include "base/relation.h"

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

extern Relation OutboxTableOpen(LOCKMODE lockmode);

#endif /* IDEMPOTENCY_OUTBOX_TABLE_H */
