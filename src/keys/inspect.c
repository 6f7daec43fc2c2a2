/*-------------------------------------------------------------------------
 *
 * keys/inspect.c
 *	  peek() and forget(): reading and deleting a stored key.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "base/compat.h"
#include "base/errors.h"
#include "keys/lock.h"
#include "keys/operation.h"
#include "keys/transaction.h"
#include "keys/wakeup.h"
#include "query/reevaluation.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_peek);
PG_FUNCTION_INFO_V1(idempotency_forget);

/*
 * peek(scope, key) RETURNS operation: NULL if nothing is stored
 */
Datum
idempotency_peek(PG_FUNCTION_ARGS)
{
	KeyRecord record;
	KeyName name;

	KeyNameFromArgs(fcinfo, &name);
	switch (KeyStoreRead(&name, &record))
	{
		case KEY_ABSENT:
		case KEY_EXPIRED:
			PG_RETURN_NULL();
		case KEY_LEASED:
		case KEY_ABANDONED:
			HideCheckpoint(&record, NULL);
			return OperationDatum(OperationType(fcinfo), OUTCOME_LEASED, &record,
								  record.fingerprint);
		case KEY_STORED:
			return OperationDatum(OperationType(fcinfo), OUTCOME_REPLAYED, &record,
								  record.fingerprint);
	}
	pg_unreachable();
}

/*
 * forget(scope, key) RETURNS boolean: deletes the row, expired or not; true if it was
 * not expired.  The owner of a deleted lease gets IK410 from its next call.
 */
Datum
idempotency_forget(PG_FUNCTION_ARGS)
{
	KeyRecord record;
	KeyVersion seen;
	KeyState state;
	KeyName name;

	PreventUnsafeCall(fcinfo, "idempotency.forget()");
	KeyNameFromArgs(fcinfo, &name);
	if (OperationIsMine(&name, 0))
		ErrorClaimedHere(&name);

	/* Probe, then lock: the table and the key in the order of a claim */
	state = KeyStoreProbe(&name, &record, &seen);
	InjectionPoint("forget-lock");
	if (!KeyLockAcquire(&name, SettingNumber(&WaitSetting, name.scope)))
		KeyLockRefused(&name);
	InjectionPoint("forget-probe");
	if (!KeyStoreUnchanged(&seen))
		state = KeyStoreProbe(&name, &record, &seen);

	/* Delete the row */
	if (state == KEY_ABSENT)
	{
		KeyLockRelease(&name);
		PG_RETURN_BOOL(false);
	}
	if (OperationIsMine(&name, record.lease.token))
		ErrorClaimedHere(&name);
	KeyStoreDelete(&name, &seen);
	LogCall("forget", psprintf("scope \"%s\", key \"%s\"", text_to_cstring(name.scope),
							   text_to_cstring(name.key)));
	ScopeSetResult(name.scope, name.key, false);
	WakeupAfterCommit(KeyLockNumber(&name));
	PG_RETURN_BOOL(state != KEY_EXPIRED);
}
