/*-------------------------------------------------------------------------
 *
 * planted.c
 *	  Errors that a server which watches its memory must report.
 *
 * That nothing is reported means something only where these are.  Each function
 * makes one error; test/sanitize/run says which kind of server sees which, and
 * how it is called there.  The compiler must not see any of them: hence volatile.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(planted_freed);
PG_FUNCTION_INFO_V1(planted_overrun);
PG_FUNCTION_INFO_V1(planted_shift);
PG_FUNCTION_INFO_V1(planted_unwritten);

/*
 * planted_freed reads a chunk after pfree().  Only the server knows: for malloc() it
 * is still in use.
 */
Datum
planted_freed(PG_FUNCTION_ARGS)
{
	volatile char *chunk = palloc0(100);

	pfree((void *) chunk);
	PG_RETURN_BOOL(chunk[50] != 0);
}

/*
 * planted_overrun reads past the end of what malloc() gave.
 */
Datum
planted_overrun(PG_FUNCTION_ARGS)
{
	volatile int size = 10;
	volatile char *room = calloc(size, 1);

	PG_RETURN_BOOL(room[size] != 0);
}

/*
 * planted_shift shifts by as many places as there are.
 */
Datum
planted_shift(PG_FUNCTION_ARGS)
{
	volatile int places = 64;

	PG_RETURN_BOOL(INT64CONST(1) << places != 0);
}

/*
 * planted_unwritten goes one way or the other by what nobody has written.
 */
Datum
planted_unwritten(PG_FUNCTION_ARGS)
{
	volatile int *chunk = palloc(10 * sizeof(int));

	if (chunk[5] == 1)
		PG_RETURN_NULL();
	PG_RETURN_BOOL(true);
}
