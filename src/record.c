/*-------------------------------------------------------------------------
 *
 * record.c
 *	  peek() and forget(): looking at what is remembered, and evicting it.
 *
 * Locks: peek() none but the table's, within the call; forget() the key's, to
 * the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "compat.h"
#include "errors.h"
#include "guc.h"
#include "keylock.h"
#include "operation.h"
#include "wakeup.h"
#include "xact.h"

PG_FUNCTION_INFO_V1(idempotency_peek);
PG_FUNCTION_INFO_V1(idempotency_forget);

/*
 * peek(scope, key) RETURNS operation: reads only; NULL where there is nothing.
 */
Datum
idempotency_peek(PG_FUNCTION_ARGS)
{
	StoredOutcome stored;
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	switch (KeyStoreRead(&name, &stored))
	{
		case KEY_ABSENT:
		case KEY_EXPIRED:
			PG_RETURN_NULL();
		case KEY_LEASED:
		case KEY_ABANDONED:
			return OperationDatum(ResultType(fcinfo), OUTCOME_IN_PROGRESS, &stored);
		case KEY_STORED:
			return OperationDatum(ResultType(fcinfo), OUTCOME_REPLAYED, &stored);
	}
	pg_unreachable();
}

/*
 * forget(scope, key) RETURNS boolean: removes what is stored, expired or not;
 * true if it was still remembered.  The owner of a lease finds out when he
 * wants to finish.
 */
Datum
idempotency_forget(PG_FUNCTION_ARGS)
{
	StoredOutcome stored;
	KeyVersion seen;
	KeyState state;
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	PreventCommandIfReadOnly("idempotency.forget()");
	if (OpenClaimFind(&name) != NULL)
		ErrorClaimedHere(&name);

	/* Look first, as a claim does, so that both take their locks in one order. */
	state = KeyStoreProbe(&name, &stored, &seen);
	InjectionPoint("forget-lock");
	if (!KeyLockAcquire(&name, DefaultWait))
		ErrorInProgress(&name);
	InjectionPoint("forget-probe");
	if (!KeyStoreUnchanged(&seen))
		state = KeyStoreProbe(&name, &stored, &seen);

	if (state == KEY_ABSENT)
	{
		KeyLockRelease(&name);
		PG_RETURN_BOOL(false);
	}
	if (TokenIsHeld(stored.lease.token))
		ErrorClaimedHere(&name);
	KeyStoreDelete(&name, &seen);
	ScopeMark(name.scope, name.key, false);
	WakeupAfterCommit(KeyLockNumber(&name));
	PG_RETURN_BOOL(state != KEY_EXPIRED);
}
