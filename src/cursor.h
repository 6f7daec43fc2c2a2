/*-------------------------------------------------------------------------
 *
 * cursor.h
 *	  How far a subscription has come in the outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CURSOR_H
#define IDEMPOTENCY_CURSOR_H

#include "utils/array.h"

/*
 * Numbers that were passed and not delivered.  Those of a transaction: the rows
 * between that it published.  Those of nobody (a hole): there was no row yet, and
 * if there is a publisher who has drawn one of them, his transaction is older
 * than the stamp.
 */
typedef struct InFlight
{
	uint64 txid; /* 0: a hole */
	uint64 stamp;
	bool over; /* the transaction is another cluster's, and over whatever its number */
	int64 from;
	int64 upto;
} InFlight;

typedef struct OutboxCursor
{
	int64 passed; /* every number up to here was delivered, or is in flight */
	int count;
	int room;
	InFlight *inFlight;
} OutboxCursor;

/*
 * Asks a cursor about numbers that never go down, in about one step each however
 * many parts it has.
 */
typedef struct CursorSweep
{
	OutboxCursor *cursor;
	int next;  /* the parts from here on begin behind the number asked for */
	int *open; /* of those before, the ones that do not end before it */
	int openCount;
} CursorSweep;

extern void CursorInit(OutboxCursor *cursor, int64 passed);
extern void CursorAdd(OutboxCursor *cursor, const InFlight *part);
extern void CursorAddRange(OutboxCursor *cursor, const InFlight *part, int64 from);
extern void CursorAddRow(OutboxCursor *cursor, uint64 txid, int64 seq);
extern void CursorAddNumber(OutboxCursor *cursor, int64 seq);
extern void CursorSweepBegin(CursorSweep *sweep, OutboxCursor *cursor);
extern void CursorSweepTo(CursorSweep *sweep, int64 seq);
extern bool CursorSweepHas(const CursorSweep *sweep, uint64 txid, int64 seq);
extern void CursorAdopt(OutboxCursor *cursor);
extern int64 CursorSafe(const OutboxCursor *cursor);
extern ArrayType *CursorToArray(const OutboxCursor *cursor);
extern void CursorFromArray(OutboxCursor *cursor, int64 passed, ArrayType *array);

#endif /* IDEMPOTENCY_CURSOR_H */
