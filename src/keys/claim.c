/*-------------------------------------------------------------------------
 *
 * keys/claim.c
 *	  claim() and try_claim(), from the first probe of a key to a granted claim.
 *
 * README lists the states of a key, the steps of a claim, and their locks.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "base/errors.h"
#include "keys/claim.h"
#include "keys/lease.h"
#include "keys/lock.h"
#include "keys/transaction.h"
#include "keys/wakeup.h"
#include "query/reevaluation.h"
#include "request/request.h"
#include "server/stats.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_claim);
PG_FUNCTION_INFO_V1(idempotency_try_claim);

/* ----------------------------------------------------------------
 * Acquiring the key
 * ----------------------------------------------------------------
 */

/*
 * OutcomeOfState returns the outcome of a claim for what a probe found.
 */
static Outcome
OutcomeOfState(const ClaimRequest *request, KeyState state, const KeyRecord *record)
{
	if (state == KEY_ABSENT)
		return OUTCOME_CLAIMED;
	if (record->lease.token != 0 && OperationIsMine(&request->name, record->lease.token))
		return OUTCOME_CLAIMED_HERE;
	if (state == KEY_EXPIRED)
		return OUTCOME_CLAIMED;
	/* NULL matches every fingerprint */
	if (request->fingerprint != NULL && record->fingerprint != NULL &&
		!TextEquals(request->fingerprint, record->fingerprint))
		return OUTCOME_MISMATCHED;
	if (state == KEY_STORED)
		return OUTCOME_REPLAYED;
	return state == KEY_ABANDONED ? OUTCOME_TAKEN_OVER : OUTCOME_LEASED;
}

/*
 * LockAndProbe locks the key of an operation that a probe found claimable, waiting
 * for at most waitMs, and probes again: the row can have changed between the probe
 * and the lock.  Returns the outcome; the key stays locked only if that grants the
 * claim.
 */
static Outcome
LockAndProbe(const ClaimRequest *request, int waitMs, Outcome probed, KeyVersion *seen,
			 KeyRecord *record)
{
	const KeyName *name = &request->name;
	Outcome outcome;

	InjectionPoint("claim-lock");
	if (!KeyLockAcquire(name, waitMs))
		return OUTCOME_LOCKED;
	InjectionPoint("claim-probe");
	if (KeyStoreUnchanged(seen))
		return probed;

	KeyStoreUnlockTable(seen);
	outcome = OutcomeOfState(request, KeyStoreProbe(name, record, seen), record);
	if (!OutcomeIsGranted(outcome))
		KeyLockRelease(name); /* the other waiters will find the same row */
	return outcome;
}

/*
 * AcquireOnce returns the outcome of a claim, waiting for the key's lock for at
 * most waitMs.  If the outcome grants the claim, key and table stay locked until
 * the transaction ends, and "seen" is the row to overwrite, if any.  Otherwise
 * neither stays locked: a session that waits for a lease must not hold up an ALTER
 * TABLE, behind which the lease's owner would wait.  Throws what KeyStoreProbe()
 * and KeyLockAcquire() throw.
 */
static Outcome
AcquireOnce(const ClaimRequest *request, int waitMs, KeyVersion *seen, KeyRecord *record)
{
	Outcome outcome;

	if (OperationIsMine(&request->name, 0))
		return OUTCOME_CLAIMED_HERE;
	outcome = OutcomeOfState(request, KeyStoreProbe(&request->name, record, seen), record);
	if (OutcomeIsGranted(outcome))
		outcome = LockAndProbe(request, waitMs, outcome, seen, record);
	if (!OutcomeIsGranted(outcome))
		KeyStoreUnlockTable(seen);
	return outcome;
}

/*
 * TimeLeft returns the rest of a wait in milliseconds.
 */
static int
TimeLeft(instr_time began, int waitMs)
{
	long left = waitMs - MillisecondsSince(began);

	return (int) Max(left, 0);
}

/*
 * WaitForLease repeats AcquireOnce() until the key is not leased or waitMs have
 * passed since "began".  Between two attempts it sleeps until the owner commits
 * or its lease ends.  What the last attempt found is in the current memory context.
 */
static Outcome
WaitForLease(const ClaimRequest *request, instr_time began, KeyVersion *seen, KeyRecord *record)
{
	MemoryContext attempt =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency wait", ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(attempt);
	uint64 number = KeyLockNumber(&request->name);
	Outcome outcome;

	for (int round = 0;; round++)
	{
		long leaseMs;
		int left;

		MemoryContextReset(attempt);
		WakeupPrepare(number);
		outcome = AcquireOnce(request, TimeLeft(began, request->waitMs), seen, record);
		left = TimeLeft(began, request->waitMs);
		if (outcome != OUTCOME_LEASED || left == 0)
			break;
		leaseMs = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), record->lease.until);
		WakeupSleepCounted(number, round, Min(left - 1, leaseMs) + 1);
	}
	WakeupCancel();

	/* "attempt" holds what was found, and is deleted with its parent. */
	MemoryContextSwitchTo(caller);
	return outcome;
}

/*
 * Acquire does AcquireOnce(), and waits for a lease to end.
 */
static Outcome
Acquire(const ClaimRequest *request, KeyVersion *seen, KeyRecord *record)
{
	instr_time began;
	Outcome outcome;

	INSTR_TIME_SET_CURRENT(began);
	outcome = AcquireOnce(request, request->waitMs, seen, record);
	if (outcome == OUTCOME_LEASED && request->waitMs > 0)
		outcome = WaitForLease(request, began, seen, record);
	return outcome;
}

/* ----------------------------------------------------------------
 * Claiming
 * ----------------------------------------------------------------
 */

/*
 * Conclude does what follows from the outcome of a claim.  It writes the lease of a granted
 * claim, if it has one, and adds the claim to those that are open in this transaction:
 * "record" becomes what the owner gets.  It records the result for require_claim(), and
 * counts it.
 */
static void
Conclude(const ClaimRequest *request, Outcome outcome, const KeyVersion *seen, KeyRecord *record)
{
	const KeyName *name = &request->name;

	if (outcome == OUTCOME_CLAIMED)
		memset(record, 0, sizeof(KeyRecord));
	if (OutcomeIsGranted(outcome))
	{
		if (record->fingerprint == NULL)
			record->fingerprint = request->fingerprint;
		record->lease.attempt++;
		record->lease.token = 0;
		if (request->lease != NULL)
			LeaseBegin(request, seen, record);
		OpenClaimAdd(name, record->fingerprint, &request->retention, seen, record->lease.token);
		record->expiresAt = 0;
	}
	InjectionPoint("claim-mark");
	if (outcome == OUTCOME_REPLAYED)
		ScopeSetReplayed(name->scope, name->key);
	else
		ScopeSetResult(name->scope, name->key, OutcomeIsGranted(outcome));
	Count(outcomeMeanings[outcome].counter);
}

/*
 * ThrowIfRefused throws IK409 for an operation in progress, and IK422 for a
 * mismatch.
 */
static void
ThrowIfRefused(const KeyName *name, Outcome outcome, const KeyRecord *record)
{
	switch (outcome)
	{
		case OUTCOME_CLAIMED:
		case OUTCOME_TAKEN_OVER:
		case OUTCOME_REPLAYED:
			return;
		case OUTCOME_MISMATCHED:
			ereport(
				ERROR,
				(errcode(ERRCODE_IDEMPOTENCY_KEY_REUSED),
				 errmsg("idempotency key was used with another request"), DetailName(name),
				 errhint("A new request needs a new key; a retry repeats the request unchanged. "
						 "Pass times and other values whose text depends on the session's "
						 "settings through idempotency.stable_text().")));
			break;
		case OUTCOME_LEASED:
			ErrorInProgress(name, record->lease.until, NULL);
		case OUTCOME_CLAIMED_HERE:
			ErrorClaimedHere(name);
		case OUTCOME_LOCKED:
			KeyLockRefused(name);
	}
}

/*
 * Claim claims the operation, or returns why it does not.  "record" becomes what the owner
 * gets, what is replayed, or the lease of another owner.  With "refuses", throws IK409 or
 * IK422 instead of returning another outcome than granted or replayed.
 */
Outcome
Claim(const ClaimRequest *request, bool refuses, KeyRecord *record)
{
	KeyVersion seen;
	Outcome outcome = Acquire(request, &seen, record);

	Conclude(request, outcome, &seen, record);
	if (refuses)
		ThrowIfRefused(&request->name, outcome, record);
	return outcome;
}

/*
 * ClaimAbsent locks the key of "name" and returns true if nothing is stored under
 * it, for callers that write at once over "seen".  Returns false if an outcome is
 * stored.  Throws IK409 if the key is claimed, here or elsewhere for longer than
 * idempotency.wait.
 */
bool
ClaimAbsent(const KeyName *name, KeyVersion *seen)
{
	ClaimRequest request = {.name = *name, .waitMs = SettingNumber(&WaitSetting, name->scope)};
	KeyRecord record;
	Outcome outcome = Acquire(&request, seen, &record);

	Count(outcomeMeanings[outcome].counter);
	ThrowIfRefused(name, outcome, &record);
	return OutcomeIsGranted(outcome);
}

/*
 * ClaimAbandoned takes over the operation that "request" names if it is abandoned
 * and no session holds its lock.  Returns whether it did.  The retention of the
 * first claim applies, and is filled in.
 */
bool
ClaimAbandoned(ClaimRequest *request, KeyRecord *record)
{
	KeyVersion seen;
	Outcome outcome = AcquireOnce(request, 0, &seen, record);

	if (outcome == OUTCOME_CLAIMED)
		KeyLockRelease(&request->name);
	if (outcome != OUTCOME_TAKEN_OVER)
		return false;
	request->retention = record->lease.retention;
	Conclude(request, outcome, &seen, record);
	return true;
}

/* ----------------------------------------------------------------
 * SQL
 * ----------------------------------------------------------------
 */

/*
 * FingerprintFromArgs returns the fingerprint that argument 6 passes, or computes
 * that of the request in argument 2; NULL without either.  Throws 22023 for both,
 * or for a fingerprint that is not a digest.
 */
static bytea *
FingerprintFromArgs(FunctionCallInfo fcinfo, const KeyName *name)
{
	bytea *fingerprint;
	int bytes;

	if (PG_ARGISNULL(6))
		return PG_ARGISNULL(2) ? NULL : FingerprintOfDocument(DocumentFromArg(fcinfo, 2));
	if (!PG_ARGISNULL(2))
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						errmsg("request and fingerprint are both given"), DetailName(name),
						errhint("Pass the request, or a fingerprint that you computed from it.")));

	fingerprint = PG_GETARG_BYTEA_PP(6);
	bytes = VARSIZE_ANY_EXHDR(fingerprint);
	if (bytes < 16 || bytes > 64)
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						errmsg("fingerprint has %d bytes", bytes), DetailName(name),
						errhint("Pass a cryptographic digest of 16 to 64 bytes, such as "
								"idempotency.fingerprint() returns.")));
	return fingerprint;
}

/*
 * RequestFromArgs reads the arguments that claim() and try_claim() share:
 * scope, key, request, lease, wait, retention, fingerprint.  Without a wait it is
 * idempotency.wait if "waits" is set, otherwise 0.  Throws what PreventUnsafeCall() throws
 * about the function of that name.
 */
static ClaimRequest
RequestFromArgs(FunctionCallInfo fcinfo, const char *function, bool waits)
{
	ClaimRequest request = {0};

	PreventUnsafeCall(fcinfo, function);
	KeyNameFromArgs(fcinfo, &request.name);
	request.lease = LeaseFromArg(fcinfo, 3);
	request.waitMs =
		WaitFromArg(fcinfo, 4, waits ? SettingNumber(&WaitSetting, request.name.scope) : 0);
	request.retention = RetentionFromArg(fcinfo, 5, request.name.scope);
	request.fingerprint = FingerprintFromArgs(fcinfo, &request.name);
	if (request.lease != NULL && !PG_ARGISNULL(2))
	{
		request.document = DocumentText(DocumentFromArg(fcinfo, 2));
		if (VARSIZE_ANY_EXHDR(request.document) >
			(Size) SettingNumber(&ResponseSizeSetting, request.name.scope))
			ErrorTooLarge(&request.name, "request", VARSIZE_ANY_EXHDR(request.document));
	}
	return request;
}

/*
 * claim(scope, key, request, lease, wait, retention, fingerprint) RETURNS
 * operation
 */
Datum
idempotency_claim(PG_FUNCTION_ARGS)
{
	ClaimRequest request = RequestFromArgs(fcinfo, "idempotency.claim()", true);
	KeyRecord record;
	Outcome outcome;

	outcome = Claim(&request, true, &record);
	return OperationDatum(OperationType(fcinfo), outcome, &record, NULL);
}

/*
 * try_claim(scope, key, request, lease, wait, retention, fingerprint) RETURNS
 * operation
 */
Datum
idempotency_try_claim(PG_FUNCTION_ARGS)
{
	ClaimRequest request = RequestFromArgs(fcinfo, "idempotency.try_claim()", false);
	KeyRecord record;
	Outcome outcome;

	outcome = Claim(&request, false, &record);
	if (outcome == OUTCOME_LEASED)
		HideCheckpoint(&record, request.fingerprint);
	return OperationDatum(OperationType(fcinfo), outcome, &record, NULL);
}
