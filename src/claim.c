/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  The state machine of one operation, and claim() and try_claim().
 *
 *		absent --claim--> claimed --complete, fail--> stored --time--> absent
 *							 '-----release, rollback-----> absent
 *
 *		absent --claim with a lease--> in progress --complete, fail--> stored
 *			in progress --time, release--> abandoned --claim--> in progress
 *
 * A transactional claim consists of the key's lock and a note in this
 * backend's memory; nothing is written until complete() or fail() stores the
 * outcome.  A leased claim writes the row at once, so that it survives commit;
 * its token fences former owners out.  The primary key of the store decides
 * who won; the lock only orders the waiters, so that the loser does no work in
 * vain.
 *
 * Locks: the key's, from a granted claim to the end of the transaction.  A
 * claim that is not granted keeps none, nor does one that waits for a lease.
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

#include "claim.h"
#include "errors.h"
#include "fingerprint.h"
#include "guc.h"
#include "keylock.h"
#include "lease.h"
#include "stats.h"
#include "wakeup.h"
#include "xact.h"

PG_FUNCTION_INFO_V1(idempotency_claim);
PG_FUNCTION_INFO_V1(idempotency_try_claim);

/* What came of an attempt to claim. */
typedef enum Attempt
{
	ATTEMPT_CLAIMED,
	ATTEMPT_TAKEN_OVER,
	ATTEMPT_STORED,
	ATTEMPT_MISMATCHED,
	ATTEMPT_LEASED,
	ATTEMPT_HELD_HERE,
	ATTEMPT_HELD_ELSEWHERE
} Attempt;

/* ----------------------------------------------------------------
 * Looking
 * ----------------------------------------------------------------
 */

/*
 * SameRequest compares fingerprints; a NULL on either side matches.
 */
static bool
SameRequest(const bytea *a, const bytea *b)
{
	return a == NULL || b == NULL || TextEquals(a, b);
}

/*
 * Judge tells what a row that a look found means for the attempt.
 */
static Attempt
Judge(const ClaimRequest *request, KeyState state, const StoredOutcome *stored)
{
	if (state == KEY_ABSENT)
		return ATTEMPT_CLAIMED;
	/* this transaction is the owner, even if the lease, or its row, has expired since */
	if (TokenIsHeld(stored->lease.token))
		return ATTEMPT_HELD_HERE;
	if (state == KEY_EXPIRED)
		return ATTEMPT_CLAIMED;
	if (!SameRequest(request->fingerprint, stored->fingerprint))
		return ATTEMPT_MISMATCHED;
	if (state == KEY_STORED)
		return ATTEMPT_STORED;
	return state == KEY_ABANDONED ? ATTEMPT_TAKEN_OVER : ATTEMPT_LEASED;
}

static bool
IsGranted(Attempt attempt)
{
	return attempt == ATTEMPT_CLAIMED || attempt == ATTEMPT_TAKEN_OVER;
}

/*
 * LookUnderLock makes sure that nothing stands in the way of a claim, and that
 * nobody else can put anything there: it looks, takes the key's lock (waiting for
 * at most waitMs), and looks again, since the owner may have come and gone
 * between the look and the lock; unless nobody at all has.  If the attempt is
 * granted, the locks of key and table are held to the end of the transaction, and
 * "seen" is the row to overwrite, if any; if not, none is: who waits for a lease
 * must not stand in the way of the table's owner, and with him of the lease's.  Throws what
 * KeyStoreProbe() and KeyLockAcquire() do.
 */
static Attempt
LookUnderLock(const ClaimRequest *request, int waitMs, KeyVersion *seen, StoredOutcome *stored)
{
	const KeyName *name = &request->name;
	Attempt attempt;

	if (OpenClaimFind(name) != NULL)
		return ATTEMPT_HELD_HERE;
	attempt = Judge(request, KeyStoreProbe(name, stored, seen), stored);
	if (!IsGranted(attempt))
	{
		KeyStoreLetGo(seen);
		return attempt;
	}
	InjectionPoint("claim-lock");
	if (!KeyLockAcquire(name, waitMs))
	{
		KeyStoreLetGo(seen);
		return ATTEMPT_HELD_ELSEWHERE;
	}
	InjectionPoint("claim-probe");
	if (KeyStoreUnchanged(seen))
		return attempt;

	KeyStoreLetGo(seen);
	attempt = Judge(request, KeyStoreProbe(name, stored, seen), stored);
	if (!IsGranted(attempt))
	{
		/* Let the other waiters through: they will find it too. */
		KeyLockRelease(name);
		KeyStoreLetGo(seen);
	}
	return attempt;
}

/*
 * TimeLeft returns how much is left of a wait, in milliseconds, whatever
 * somebody does to the clock meanwhile.
 */
static int
TimeLeft(instr_time began, int waitMs)
{
	instr_time elapsed;

	INSTR_TIME_SET_CURRENT(elapsed);
	INSTR_TIME_SUBTRACT(elapsed, began);
	return (int) Max(0, waitMs - (int64) INSTR_TIME_GET_MILLISEC(elapsed));
}

/*
 * WaitForOwner looks again and again, each time under a fresh snapshot, until
 * the lease of the key's owner no longer is in the way or waitMs are over.  It
 * sleeps until the owner is done, or his lease is.  What the last look found
 * is in the current memory context.
 */
static Attempt
WaitForOwner(const ClaimRequest *request, instr_time began, KeyVersion *seen, StoredOutcome *stored)
{
	MemoryContext look =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency look", ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(look);
	uint64 number = KeyLockNumber(&request->name);
	Attempt attempt;

	for (int round = 0;; round++)
	{
		long leaseMs;
		int left;

		MemoryContextReset(look);
		WakeupPrepare(number);
		attempt = LookUnderLock(request, TimeLeft(began, request->waitMs), seen, stored);
		left = TimeLeft(began, request->waitMs);
		if (attempt != ATTEMPT_LEASED || left == 0)
			break;
		leaseMs = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), stored->lease.until);
		WakeupSleepCounted(number, round, Min(left - 1, leaseMs) + 1);
	}
	WakeupCancel();

	/* "look" goes with its parent: it holds what was found. */
	MemoryContextSwitchTo(caller);
	return attempt;
}

/*
 * Look does LookUnderLock(), and waits for an owner who has a lease.
 */
static Attempt
Look(const ClaimRequest *request, KeyVersion *seen, StoredOutcome *stored)
{
	instr_time began;
	Attempt attempt;

	INSTR_TIME_SET_CURRENT(began);
	attempt = LookUnderLock(request, request->waitMs, seen, stored);
	if (attempt == ATTEMPT_LEASED && request->waitMs > 0)
		attempt = WaitForOwner(request, began, seen, stored);
	return attempt;
}

/*
 * Count counts what a caller is told.
 */
static void
Count(Attempt attempt)
{
	static const CounterKind counters[] = {
		[ATTEMPT_CLAIMED] = COUNT_CLAIMS,
		[ATTEMPT_TAKEN_OVER] = COUNT_TAKEOVERS,
		[ATTEMPT_STORED] = COUNT_REPLAYS,
		[ATTEMPT_MISMATCHED] = COUNT_MISMATCHES,
		[ATTEMPT_LEASED] = COUNT_IN_PROGRESS,
		[ATTEMPT_HELD_HERE] = COUNT_IN_PROGRESS,
		[ATTEMPT_HELD_ELSEWHERE] = COUNT_IN_PROGRESS,
	};

	CountEvent(counters[attempt]);
}

/*
 * ClaimAbsent locks the key of "name" and returns true if nothing is stored
 * under it, for callers that write at once.  Returns false if something is.
 * Throws IK409 if it is claimed, here or elsewhere for longer than waitMs.
 */
bool
ClaimAbsent(const KeyName *name, int waitMs, KeyVersion *seen)
{
	ClaimRequest request = {.name = *name, .waitMs = waitMs};
	StoredOutcome stored;
	Attempt attempt = Look(&request, seen, &stored);

	Count(attempt);
	switch (attempt)
	{
		case ATTEMPT_CLAIMED:
		case ATTEMPT_TAKEN_OVER:
			return true;
		case ATTEMPT_STORED:
		case ATTEMPT_MISMATCHED: /* not without a fingerprint */
			return false;
		case ATTEMPT_LEASED:
			ErrorLeased(name, stored.lease.until);
		case ATTEMPT_HELD_HERE:
			ErrorClaimedHere(name);
		case ATTEMPT_HELD_ELSEWHERE:
			ErrorInProgress(name);
	}
	pg_unreachable();
}

/* ----------------------------------------------------------------
 * Claiming
 * ----------------------------------------------------------------
 */

/*
 * Grant makes a granted attempt a claim: with a lease it is written, without
 * one it is noted as open, to be finished before commit.  "stored" becomes
 * what the owner is told.
 */
static void
Grant(const ClaimRequest *request, Attempt attempt, const KeyVersion *seen, StoredOutcome *stored)
{
	if (attempt == ATTEMPT_CLAIMED)
		memset(stored, 0, sizeof(StoredOutcome));
	if (stored->fingerprint == NULL)
		stored->fingerprint = request->fingerprint;
	stored->lease.attempt++;
	stored->lease.token = 0;
	if (request->lease != NULL)
		LeaseBegin(request, seen, stored);
	OpenClaimAdd(&request->name, stored->fingerprint, &request->retention, seen,
				 stored->lease.token);
	stored->expiresAt = 0;
}

/*
 * TryClaim claims the operation, or says why not.  "stored" is filled with
 * what the caller is told.
 */
static Attempt
TryClaim(const ClaimRequest *request, StoredOutcome *stored)
{
	KeyVersion seen;
	Attempt attempt = Look(request, &seen, stored);

	if (IsGranted(attempt))
		Grant(request, attempt, &seen, stored);
	InjectionPoint("claim-mark");
	ScopeMark(request->name.scope, request->name.key, IsGranted(attempt));
	Count(attempt);
	return attempt;
}

/*
 * ClaimOrThrow claims the operation, or fills "stored" with the outcome to
 * replay.  Throws IK409 if it is in progress and IK422 if the key was used
 * with another request.
 */
Outcome
ClaimOrThrow(const ClaimRequest *request, StoredOutcome *stored)
{
	switch (TryClaim(request, stored))
	{
		case ATTEMPT_CLAIMED:
			return OUTCOME_CLAIMED;
		case ATTEMPT_TAKEN_OVER:
			return OUTCOME_TAKEN_OVER;
		case ATTEMPT_STORED:
			return OUTCOME_REPLAYED;
		case ATTEMPT_MISMATCHED:
			ErrorKeyReused(&request->name);
		case ATTEMPT_LEASED:
			ErrorLeased(&request->name, stored->lease.until);
		case ATTEMPT_HELD_HERE:
			ErrorClaimedHere(&request->name);
		case ATTEMPT_HELD_ELSEWHERE:
			ErrorInProgress(&request->name);
	}
	pg_unreachable();
}

/*
 * ClaimAbandoned takes over the operation that "request" names if it is
 * abandoned and nobody holds it.  The retention stays that of the first claim,
 * and is filled in.  Returns whether it did.
 */
bool
ClaimAbandoned(ClaimRequest *request, StoredOutcome *stored)
{
	KeyVersion seen;
	Attempt attempt = LookUnderLock(request, 0, &seen, stored);

	if (attempt == ATTEMPT_CLAIMED)
		KeyLockRelease(&request->name);
	if (attempt != ATTEMPT_TAKEN_OVER)
		return false;
	request->retention = stored->lease.retention;
	Grant(request, attempt, &seen, stored);
	ScopeMark(request->name.scope, request->name.key, true);
	Count(attempt);
	return true;
}

/* ----------------------------------------------------------------
 * SQL
 * ----------------------------------------------------------------
 */

/*
 * FingerprintFromArgs returns the fingerprint that was passed, or that of the
 * request that was passed, or NULL.  Throws IK400 for both, or for no digest.
 */
static bytea *
FingerprintFromArgs(FunctionCallInfo fcinfo, const KeyName *name, int requestArg,
					int fingerprintArg)
{
	bytea *fingerprint;
	int bytes;

	if (PG_ARGISNULL(fingerprintArg))
		return PG_ARGISNULL(requestArg) ? NULL
										: FingerprintOfDocument(PG_GETARG_TEXT_PP(requestArg));
	if (!PG_ARGISNULL(requestArg))
		ErrorRequestAndFingerprint(name);

	fingerprint = PG_GETARG_BYTEA_PP(fingerprintArg);
	bytes = VARSIZE_ANY_EXHDR(fingerprint);
	if (bytes < 16 || bytes > 64)
		ErrorFingerprintLength(name, bytes);
	return fingerprint;
}

/*
 * RequestFromArgs reads the arguments that claim() and try_claim() share:
 * scope, key, request, lease, wait, retention, fingerprint.
 */
static ClaimRequest
RequestFromArgs(FunctionCallInfo fcinfo, int defaultWaitMs)
{
	ClaimRequest request = {0};

	KeyNameFromArgs(fcinfo, 0, &request.name);
	request.lease = LeaseFromArg(fcinfo, 3);
	request.waitMs = WaitFromArg(fcinfo, 4, defaultWaitMs);
	request.retention = RetentionFromArg(fcinfo, 5);
	request.fingerprint = FingerprintFromArgs(fcinfo, &request.name, 2, 6);
	if (request.lease != NULL && !PG_ARGISNULL(2))
	{
		request.document = PG_GETARG_TEXT_PP(2);
		if (VARSIZE_ANY_EXHDR(request.document) > (Size) MaxResponseSize)
			ErrorTooLarge(&request.name, "request", VARSIZE_ANY_EXHDR(request.document),
						  MaxResponseSize);
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
	ClaimRequest request = RequestFromArgs(fcinfo, DefaultWait);
	StoredOutcome stored;
	Outcome outcome;

	PreventCommandIfReadOnly("idempotency.claim()");
	outcome = ClaimOrThrow(&request, &stored);
	return OperationDatum(ResultType(fcinfo), outcome, &stored);
}

/*
 * try_claim(scope, key, request, lease, wait, retention, fingerprint) RETURNS
 * operation
 */
Datum
idempotency_try_claim(PG_FUNCTION_ARGS)
{
	ClaimRequest request = RequestFromArgs(fcinfo, 0);
	StoredOutcome stored;
	Outcome outcome = OUTCOME_IN_PROGRESS;
	bool known = true;

	PreventCommandIfReadOnly("idempotency.try_claim()");
	switch (TryClaim(&request, &stored))
	{
		case ATTEMPT_CLAIMED:
			outcome = OUTCOME_CLAIMED;
			break;
		case ATTEMPT_TAKEN_OVER:
			outcome = OUTCOME_TAKEN_OVER;
			break;
		case ATTEMPT_STORED:
			outcome = OUTCOME_REPLAYED;
			break;
		case ATTEMPT_MISMATCHED:
			outcome = OUTCOME_MISMATCHED;
			break;
		case ATTEMPT_LEASED:
			break;
		case ATTEMPT_HELD_HERE:
		case ATTEMPT_HELD_ELSEWHERE:
			known = false;
			break;
	}
	return OperationDatum(ResultType(fcinfo), outcome, known ? &stored : NULL);
}
