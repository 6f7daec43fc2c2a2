/*-------------------------------------------------------------------------
 *
 * base/subtransaction.c
 *	  Running code in a subtransaction.
 *
 * Locks: what the code takes; to the end of the transaction, unless it fails.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/resowner.h"

#include "base/subtransaction.h"

/*
 * SubtransactionRun calls "body" in a subtransaction and the current memory context.
 * Returns NULL if it has committed.  If the body has thrown, the subtransaction is
 * rolled back, and the error returned, in the current memory context.
 */
ErrorData *
SubtransactionRun(SubtransactionBody *body, void *argument)
{
	MemoryContext callerContext = CurrentMemoryContext;
	ResourceOwner callerOwner = CurrentResourceOwner;
	ErrorData *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(callerContext);
	PG_TRY();
	{
		body(argument);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(callerContext);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(callerContext);
	CurrentResourceOwner = callerOwner;
	return error;
}
