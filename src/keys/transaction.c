/*-------------------------------------------------------------------------
 *
 * keys/transaction.c
 *	  What the current transaction has claimed, how that follows savepoints, and
 *	  the commit guard.
 *
 * SET CONSTRAINTS ALL IMMEDIATE checks what COMMIT would: it runs deferred triggers and
 * checks now, and test suites that roll back call it instead of COMMIT.
 *
 * Three lists live in TopTransactionContext, newest first: open claims, results by
 * scope, and passed tokens.  README says how each follows savepoints, and what the
 * guard refuses.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "nodes/parsenodes.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "base/errors.h"
#include "base/pattern.h"
#include "keys/transaction.h"
#include "keys/wakeup.h"
#include "server/stats.h"

/* The result of the latest call about a scope. */
typedef struct ScopeResult
{
	dlist_node node;
	text *scope;
	text *key;	   /* NULL: a batch, or neither granted nor replayed */
	bool granted;  /* the transaction may write to tables that require a claim */
	bool replayed; /* claim() returned a stored outcome */
	SubTransactionId setIn;
} ScopeResult;

typedef struct PassedToken
{
	dlist_node node;
	int64 token;
	KeyName name;			   /* scope NULL: the call failed before the name was read */
	bool granted;			   /* to this transaction, in heldIn */
	SubTransactionId heldIn;   /* the first success, which locked the key; invalid: none */
	SubTransactionId provenIn; /* the last call, if it succeeded; invalid: unproven */
} PassedToken;

static dlist_head claims = DLIST_STATIC_INIT(claims);
static dlist_head results = DLIST_STATIC_INIT(results);
static dlist_head tokens = DLIST_STATIC_INIT(tokens);

/* Why the transaction must abort: an operation that it does not own. */
static int notOwnedError; /* the SQLSTATE; 0: none */
static KeyName notOwned;  /* scope NULL: there was no memory for the name */

static ProcessUtility_hook_type previousUtility = NULL;

/* ----------------------------------------------------------------
 * Open claims
 * ----------------------------------------------------------------
 */

static bool
IsOpen(const OpenClaim *claim)
{
	return claim->closedIn == InvalidSubTransactionId;
}

/*
 * KeepName copies a name, to the end of the transaction.  "kept" changes only once both
 * copies exist: without memory for one, it stays without a name.
 */
static void
KeepName(const KeyName *name, KeyName *kept)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	KeyName copy = *name;

	copy.scope = TextCopy(name->scope);
	copy.key = TextCopy(name->key);
	*kept = copy;
	MemoryContextSwitchTo(caller);
}

/*
 * OpenClaimFind returns the open claim of this transaction on "name", or NULL.
 */
OpenClaim *
OpenClaimFind(const KeyName *name)
{
	dlist_iter iter;

	dlist_foreach (iter, &claims)
	{
		OpenClaim *claim = dlist_container(OpenClaim, node, iter.cur);

		if (IsOpen(claim) && KeyNameEquals(&claim->name, name))
			return claim;
	}
	return NULL;
}

/*
 * AnyClaimOpen tells whether this transaction has claims that are open, or that a rollback to
 * a savepoint would open again.
 */
bool
AnyClaimOpen(void)
{
	return !dlist_is_empty(&claims);
}

/*
 * OpenClaimAdd adds a claim of the current subtransaction on "name", with the lease of
 * "token", or without one.  All is copied.  The caller holds the key's lock.
 */
void
OpenClaimAdd(const KeyName *name, const bytea *fingerprint, const Retention *retention,
			 const KeyVersion *seen, int64 token)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	OpenClaim *claim = palloc0(sizeof(OpenClaim));

	KeepName(name, &claim->name);
	claim->fingerprint = TextCopy(fingerprint);
	claim->retention = *retention;
	claim->seen = *seen;
	claim->token = token;
	claim->openedIn = GetCurrentSubTransactionId();
	claim->closedIn = InvalidSubTransactionId;
	dlist_push_head(&claims, &claim->node);
	MemoryContextSwitchTo(caller);
}

static void
DeleteClaim(OpenClaim *claim)
{
	dlist_delete(&claim->node);
	pfree(claim->name.scope);
	pfree(claim->name.key);
	if (claim->fingerprint != NULL)
		pfree(claim->fingerprint);
	pfree(claim);
}

/*
 * OpenClaimClose closes a completed, failed or released claim.  The pointer is invalid
 * afterwards.
 */
void
OpenClaimClose(OpenClaim *claim)
{
	claim->closedIn = GetCurrentSubTransactionId();
	if (claim->closedIn == claim->openedIn)
		DeleteClaim(claim);
}

/* ----------------------------------------------------------------
 * Results by scope
 * ----------------------------------------------------------------
 */

static void
DeleteResult(ScopeResult *result)
{
	dlist_delete(&result->node);
	pfree(result->scope);
	if (result->key != NULL)
		pfree(result->key);
	pfree(result);
}

/*
 * DeleteResultOf deletes the result of "scope" that a subtransaction set, from the
 * node "from" on; there is one at most.
 */
static void
DeleteResultOf(const text *scope, SubTransactionId setIn, dlist_node *from)
{
	for (dlist_node *node = from; node != &results.head; node = node->next)
	{
		ScopeResult *result = dlist_container(ScopeResult, node, node);

		if (result->setIn == setIn && TextEquals(result->scope, scope))
		{
			DeleteResult(result);
			return;
		}
	}
}

static void
SetResult(const text *scope, const text *key, bool granted, bool replayed)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	ScopeResult *result = palloc(sizeof(ScopeResult));

	result->scope = TextCopy(scope);
	result->key = granted || replayed ? TextCopy(key) : NULL;
	result->granted = granted;
	result->replayed = replayed;
	result->setIn = GetCurrentSubTransactionId();
	if (!dlist_is_empty(&results))
		DeleteResultOf(scope, result->setIn, dlist_head_node(&results));
	dlist_push_head(&results, &result->node);
	MemoryContextSwitchTo(caller);
}

/*
 * ScopeSetResult sets the result of the latest call about "scope": whether it granted
 * a claim, and on which key.
 */
void
ScopeSetResult(const text *scope, const text *key, bool granted)
{
	SetResult(scope, key, granted, false);
}

/*
 * ScopeSetReplayed sets the result of a claim that returned a stored outcome.
 */
void
ScopeSetReplayed(const text *scope, const text *key)
{
	SetResult(scope, key, false, true);
}

/*
 * LatestResult returns the result of the latest call about "scope", or about a scope that
 * the pattern "scope" matches; NULL if there was none.
 */
static const ScopeResult *
LatestResult(const text *scope, bool isPattern)
{
	dlist_iter iter;

	dlist_foreach (iter, &results)
	{
		const ScopeResult *result = dlist_container(ScopeResult, node, iter.cur);

		if (isPattern ? PatternMatches(scope, result->scope) : TextEquals(scope, result->scope))
			return result;
	}
	return NULL;
}

/*
 * ScopeGranted tells whether the latest call about a scope that "pattern" matches granted a
 * claim.  "asked" is set to whether there was such a call.
 */
bool
ScopeGranted(const text *pattern, bool *asked)
{
	const ScopeResult *latest = LatestResult(pattern, true);

	*asked = latest != NULL;
	return latest != NULL && latest->granted;
}

/*
 * ScopeCurrentKey returns the key that this transaction claimed last in "scope", or
 * NULL if the latest call there granted no claim.  It is not a copy.
 */
const text *
ScopeCurrentKey(const text *scope)
{
	const ScopeResult *latest = LatestResult(scope, false);

	return latest == NULL || !latest->granted ? NULL : latest->key;
}

/*
 * ScopeReplayed tells whether the latest call about the scope of "name" was a claim of
 * its key that returned a stored outcome.
 */
bool
ScopeReplayed(const KeyName *name)
{
	const ScopeResult *latest = LatestResult(name->scope, false);

	return latest != NULL && latest->replayed && TextEquals(latest->key, name->key);
}

/*
 * ScopeForgetResults forgets the results of all calls.  A rollback to an earlier savepoint brings
 * none of them back.
 */
void
ScopeForgetResults(void)
{
	while (!dlist_is_empty(&results))
		DeleteResult(dlist_container(ScopeResult, node, dlist_head_node(&results)));
}

/*
 * LastGrantedClaim sets scope and key of the claim that was granted last, in any scope whose
 * latest call it was, and returns whether there is one.  They are not copies.
 */
bool
LastGrantedClaim(const text **scope, const text **key)
{
	dlist_iter iter;

	dlist_foreach (iter, &results)
	{
		const ScopeResult *result = dlist_container(ScopeResult, node, iter.cur);

		if (result->granted && result->key != NULL && LatestResult(result->scope, false) == result)
		{
			*scope = result->scope;
			*key = result->key;
			return true;
		}
	}
	return false;
}

/* ----------------------------------------------------------------
 * Tokens
 * ----------------------------------------------------------------
 */

static PassedToken *
TokenFind(int64 token)
{
	dlist_iter iter;

	dlist_foreach (iter, &tokens)
	{
		PassedToken *passed = dlist_container(PassedToken, node, iter.cur);

		if (passed->token == token)
			return passed;
	}
	return NULL;
}

static PassedToken *
TokenAdd(int64 token)
{
	PassedToken *passed = MemoryContextAllocZero(TopTransactionContext, sizeof(PassedToken));

	passed->token = token;
	dlist_push_head(&tokens, &passed->node);
	return passed;
}

static void
DeleteToken(PassedToken *passed)
{
	dlist_delete(&passed->node);
	if (passed->name.scope != NULL)
	{
		pfree(passed->name.scope);
		pfree(passed->name.key);
	}
	pfree(passed);
}

/*
 * TokenGranted adds a new token, which the current subtransaction got: the lease is
 * written, and the key locked.  A rollback of the claim deletes the token.
 */
void
TokenGranted(int64 token)
{
	PassedToken *passed = TokenAdd(token);

	passed->granted = true;
	passed->heldIn = GetCurrentSubTransactionId();
	passed->provenIn = passed->heldIn;
}

/*
 * TokenPassed marks a token as unproven: a call about the operation "name", or NULL while
 * that is unknown, has begun with it.  Until TokenProven(), the transaction cannot commit.
 */
void
TokenPassed(int64 token, const KeyName *name)
{
	PassedToken *passed = TokenFind(token);

	if (passed == NULL)
		passed = TokenAdd(token);
	passed->provenIn = InvalidSubTransactionId;
	if (name != NULL && passed->name.scope == NULL)
		KeepName(name, &passed->name);
}

/*
 * TokenProven marks a token as current: the current subtransaction has locked and
 * written its row.
 */
void
TokenProven(int64 token)
{
	PassedToken *passed = TokenFind(token);

	Assert(passed != NULL);
	passed->provenIn = GetCurrentSubTransactionId();
	if (passed->heldIn == InvalidSubTransactionId)
		passed->heldIn = passed->provenIn;
}

/*
 * AnyTokenPassed tells whether the transaction has used leases.
 */
bool
AnyTokenPassed(void)
{
	return !dlist_is_empty(&tokens);
}

/*
 * OperationIsMine tells whether this transaction owns the operation "name": it has claimed it,
 * or has locked its key by the token of the lease in its row, "token" (0: no lease, or the row was
 * not read).  It owns the operation until it ends, or rolls back to a savepoint: whatever failed
 * since, and even if the lease has expired.
 */
bool
OperationIsMine(const KeyName *name, int64 token)
{
	const PassedToken *passed = token == 0 ? NULL : TokenFind(token);

	return OpenClaimFind(name) != NULL ||
		   (passed != NULL && passed->heldIn != InvalidSubTransactionId);
}

/*
 * UnprovenToken returns a token that was passed and is not proven, or NULL.
 */
static const PassedToken *
UnprovenToken(void)
{
	dlist_iter iter;

	dlist_foreach (iter, &tokens)
	{
		const PassedToken *passed = dlist_container(PassedToken, node, iter.cur);

		if (passed->provenIn == InvalidSubTransactionId)
			return passed;
	}
	return NULL;
}

/* ----------------------------------------------------------------
 * Savepoints
 * ----------------------------------------------------------------
 */

/*
 * EndClaims gives to the parent what a subtransaction did with claims.  An invalid parent
 * means that the subtransaction aborts, which undoes that.
 */
static void
EndClaims(SubTransactionId child, SubTransactionId parent)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify (iter, &claims)
	{
		OpenClaim *claim = dlist_container(OpenClaim, node, iter.cur);

		if (claim->openedIn == child)
			claim->openedIn = parent;
		if (claim->closedIn == child)
			claim->closedIn = parent;
		/* opened and closed in one, or opened in one that aborts: both are invalid then */
		if (claim->closedIn == claim->openedIn)
			DeleteClaim(claim);
	}
}

/*
 * EndResults does the same with results.  Those of the subtransaction precede all others.
 */
static void
EndResults(SubTransactionId child, SubTransactionId parent)
{
	for (dlist_node *node = results.head.next, *next; node != &results.head; node = next)
	{
		ScopeResult *result = dlist_container(ScopeResult, node, node);

		if (result->setIn != child)
			break;
		/* no rollback can uncover the parent's own result any more */
		if (parent != InvalidSubTransactionId)
			DeleteResultOf(result->scope, parent, node->next);
		result->setIn = parent;
		next = node->next;
		if (parent == InvalidSubTransactionId)
			DeleteResult(result);
	}
}

/*
 * EndTokens does the same with tokens.  If the subtransaction that aborts made the last
 * call with a token, the token is unproven, whatever an earlier call did.
 */
static void
EndTokens(SubTransactionId child, SubTransactionId parent)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify (iter, &tokens)
	{
		PassedToken *passed = dlist_container(PassedToken, node, iter.cur);

		if (passed->provenIn == child)
			passed->provenIn = parent;
		if (passed->heldIn != child)
			continue;
		passed->heldIn = parent;
		if (passed->granted && parent == InvalidSubTransactionId)
			DeleteToken(passed);
	}
}

static void
SubTransactionCallback(SubXactEvent event, SubTransactionId child, SubTransactionId parent,
					   void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		parent = InvalidSubTransactionId;
	else if (event != SUBXACT_EVENT_COMMIT_SUB)
		return;
	EndClaims(child, parent);
	EndResults(child, parent);
	EndTokens(child, parent);
}

/* ----------------------------------------------------------------
 * The commit guard
 * ----------------------------------------------------------------
 */

/*
 * PreventCommit makes the current transaction fail at commit, even if the error that
 * the caller throws next, with the same SQLSTATE, is caught.
 */
void
PreventCommit(const KeyName *name, int sqlstate)
{
	if (notOwnedError != 0)
		return;
	notOwnedError = sqlstate;
	KeepName(name, &notOwned);
}

/*
 * ErrorTokenUnproven reports, at commit, that no call with the token has succeeded, or
 * that the call was rolled back; "name" is NULL if the call passed no valid one.
 */
pg_noreturn static void
ErrorTokenUnproven(const KeyName *name, int64 token)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_CLAIM_LOST),
			 errmsg("cannot commit without proof that the lease is current"),
			 DetailToken(name, token),
			 errhint("A call with this token failed and was caught, or was rolled back. Call "
					 "idempotency.complete(), fail(), release(), renew() or checkpoint() with the "
					 "token again, or roll back and begin the retry with idempotency.claim().")));
}

/*
 * ErrorCommitPrevented reports, at commit, that an error with this SQLSTATE was caught;
 * "name" is the operation it was about, or NULL if that is unknown.
 */
pg_noreturn static void
ErrorCommitPrevented(const KeyName *name, int sqlstate)
{
	ereport(ERROR,
			(errcode(sqlstate),
			 sqlstate == ERRCODE_IDEMPOTENCY_NO_CLAIM
				 ? errmsg("cannot commit after a call without a claim")
				 : errmsg("cannot commit after a lost lease"),
			 name == NULL ? 0 : DetailName(name),
			 sqlstate == ERRCODE_IDEMPOTENCY_NO_CLAIM
				 ? errhint("Roll back, and claim and complete in one transaction, or pass the "
						   "token of the lease.")
				 : errhint("An error of complete(), fail(), release(), renew() or checkpoint() "
						   "was caught in this transaction. Roll back, and begin the retry with "
						   "idempotency.claim().")));
}

/*
 * ErrorNotCompleted reports, at commit or PREPARE TRANSACTION, that claims are open;
 * "name" is the oldest of them.
 */
pg_noreturn static void
ErrorNotCompleted(const KeyName *name, int openClaims, bool preparing)
{
	Count(COUNT_REFUSED_COMMITS);
	ereport(
		ERROR,
		(errcode(ERRCODE_IDEMPOTENCY_NOT_COMPLETED),
		 preparing ? errmsg("cannot prepare a transaction with an open idempotency claim")
				   : errmsg("cannot commit a transaction with an open idempotency claim"),
		 openClaims == 1
			 ? DetailName(name)
			 : errdetail("Scope \"%s\", key \"%s\", and %d more.", text_to_cstring(name->scope),
						 text_to_cstring(name->key), openClaims - 1),
		 IsTransactionBlock()
			 ? errhint("Call idempotency.complete(), fail() or release() in the transaction "
					   "that claimed.")
			 : errhint("This statement was a transaction of its own (autocommit). Put BEGIN and "
					   "COMMIT around idempotency.claim(), your writes and "
					   "idempotency.complete(). A function that claims, and a procedure before "
					   "its own COMMIT, must also complete, fail or release.")));
}

/*
 * CheckMayCommit throws IK410, IK412 or IK428 if the transaction could not commit now;
 * "preparing" is for PREPARE TRANSACTION.
 */
void
CheckMayCommit(bool preparing)
{
	const PassedToken *unproven = UnprovenToken();
	const KeyName *oldest = NULL;
	int open = 0;
	dlist_iter iter;

	if (notOwnedError != 0)
		ErrorCommitPrevented(notOwned.scope == NULL ? NULL : &notOwned, notOwnedError);
	if (unproven != NULL)
		ErrorTokenUnproven(unproven->name.scope == NULL ? NULL : &unproven->name, unproven->token);

	dlist_foreach (iter, &claims)
	{
		OpenClaim *claim = dlist_container(OpenClaim, node, iter.cur);

		if (IsOpen(claim) && claim->token == 0)
		{
			oldest = &claim->name;
			open++;
		}
	}
	if (open > 0)
		ErrorNotCompleted(oldest, open, preparing);
}

/*
 * TransactionMustAbort tells whether the transaction must abort: a call found that it
 * does not own an operation, or failed before it could tell.
 */
bool
TransactionMustAbort(void)
{
	return notOwnedError != 0 || UnprovenToken() != NULL;
}

/*
 * Reset empties all lists; TopTransactionContext frees the memory.
 */
static void
Reset(void)
{
	dlist_init(&claims);
	dlist_init(&results);
	dlist_init(&tokens);
	notOwnedError = 0;
	memset(&notOwned, 0, sizeof(notOwned));
}

static void
TransactionCallback(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			CheckMayCommit(false);
			break;
		case XACT_EVENT_PRE_PREPARE:
			CheckMayCommit(true);
			break;
		case XACT_EVENT_COMMIT:
			WakeupAtCommit();
			Reset();
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			WakeupAtAbort();
			Reset();
			break;
		case XACT_EVENT_PARALLEL_PRE_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PARALLEL_ABORT:
			/* The functions are PARALLEL UNSAFE: parallel workers claim nothing. */
			break;
	}
}

/*
 * UtilityWithCheck runs a utility command.  After SET CONSTRAINTS ALL IMMEDIATE it throws
 * what CheckMayCommit() throws.
 */
static void
UtilityWithCheck(PlannedStmt *statement, const char *source, bool readOnlyTree,
				 ProcessUtilityContext context, ParamListInfo parameters,
				 QueryEnvironment *environment, DestReceiver *receiver, QueryCompletion *completion)
{
	ProcessUtility_hook_type next =
		previousUtility != NULL ? previousUtility : standard_ProcessUtility;
	const ConstraintsSetStmt *set = (const ConstraintsSetStmt *) statement->utilityStmt;
	bool checks = IsA(set, ConstraintsSetStmt) && set->constraints == NIL && !set->deferred;

	next(statement, source, readOnlyTree, context, parameters, environment, receiver, completion);
	if (checks)
		CheckMayCommit(false);
}

/*
 * TransactionStateInit registers the callbacks and the hook; called once per backend.
 */
void
TransactionStateInit(void)
{
	previousUtility = ProcessUtility_hook;
	ProcessUtility_hook = UtilityWithCheck;
	RegisterXactCallback(TransactionCallback, NULL);
	RegisterSubXactCallback(SubTransactionCallback, NULL);
}
