/*-------------------------------------------------------------------------
 *
 * outbox/cursor.h
 *	  How far a subscription has read the outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_CURSOR_H
#define IDEMPOTENCY_OUTBOX_CURSOR_H

#include "utils/array.h"

/*
 * Numbers that were passed and not delivered.  For a transaction: the rows between them
 * that it published.  For a hole: no row existed, and a publisher that has drawn one of
 * the numbers has a transaction older than the stamp.
 */
typedef struct InFlight
{
	uint64 txid;  /* 0: a hole or, without a stamp, numbers to deliver later */
	uint64 stamp; /* of a hole */
	bool ended;	  /* a transaction of another cluster, which has ended whatever its id */
	int64 from;
	int64 upto;
} InFlight;

typedef struct OutboxCursor
{
	int64 passed; /* every number up to here was delivered, or is in the list */
	int count;
	int capacity;
	InFlight *inFlight;
} OutboxCursor;

extern void CursorInit(OutboxCursor *cursor, int64 passed);
extern void CursorAdd(OutboxCursor *cursor, const InFlight *part);
extern void CursorAddRow(OutboxCursor *cursor, uint64 txid, int64 seq);
extern void CursorAddNumber(OutboxCursor *cursor, int64 seq);
extern void CursorSort(OutboxCursor *cursor);
extern InFlight *CursorFind(const OutboxCursor *cursor, uint64 txid, int64 seq);
extern bool CursorHas(const OutboxCursor *cursor, uint64 txid, int64 seq);
extern void CursorAdopt(OutboxCursor *cursor);
extern ArrayType *NumbersToArray(const int64 *numbers, int count);
extern int64 *NumbersFromArray(ArrayType *array, int multiple, int *count);
extern ArrayType *CursorToArray(const OutboxCursor *cursor);
extern void CursorFromArray(OutboxCursor *cursor, int64 passed, ArrayType *array);

#endif /* IDEMPOTENCY_OUTBOX_CURSOR_H */
