/*-------------------------------------------------------------------------
 *
 * planted.c
 *	  Errors that an instrumented server must report.
 *
 * An empty report means something only if these errors are reported. Each function
 * makes one error. test/servers/sanitize/run lists the kind of server that detects it and the
 * call there. The compiler must not see the errors: hence volatile.
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
 * planted_freed reads a chunk after pfree(). Only the server detects it: for malloc()
 * the block is still in use.
 */
Datum
planted_freed(PG_FUNCTION_ARGS)
{
	volatile char *chunk = palloc0(100);

	pfree((void *) chunk);
	PG_RETURN_BOOL(chunk[50] != 0);
}

/*
 * planted_overrun reads past the end of a block of malloc().
 */
Datum
planted_overrun(PG_FUNCTION_ARGS)
{
	volatile int size = 10;
	volatile char *block = calloc(size, 1);

	PG_RETURN_BOOL(block[size] != 0);
}

/*
 * planted_shift shifts by the width of the type.
 */
Datum
planted_shift(PG_FUNCTION_ARGS)
{
	volatile int places = 64;

	PG_RETURN_BOOL(INT64CONST(1) << places != 0);
}

/*
 * planted_unwritten branches on uninitialized memory.
 */
Datum
planted_unwritten(PG_FUNCTION_ARGS)
{
	volatile int *chunk = palloc(10 * sizeof(int));

	if (chunk[5] == 1)
		PG_RETURN_NULL();
	PG_RETURN_BOOL(true);
}
