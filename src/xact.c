/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  What the current transaction has claimed, how that follows savepoints,
 *	  and the guard at commit.
 *
 * Three lists live in TopTransactionContext, newest first:
 *
 * - Open claims.  Each knows the subtransaction that opened it and the one
 *	 that closed it.  A rollback of the first drops the claim, a rollback of
 *	 the second opens it again; a release hands both to the parent.  When both
 *	 are the same, nothing can open the claim again, and it is forgotten.
 *
 * - Scope marks: what the last call about each scope was granted, for
 *	 require_claim() and current_key().  A rollback uncovers the mark before.
 *
 * - Tokens that this transaction has passed.  From the entry of the function
 *	 that takes it, a token is unproven; a call that succeeds has found the
 *	 token current and keeps the row locked, so it is proven until the
 *	 subtransaction that made the call rolls back.  The note itself survives
 *	 every rollback: what was written before the call, or is written after it,
 *	 must not commit without the lease.
 *
 * The transaction can neither commit nor be prepared with a claim without a lease that
 * is still open (IK428), with an unproven token, or after a call that found the lease
 * lost (IK410) or no claim at all (IK412), caught or not.  Errors are thrown from
 * PRE_COMMIT and PRE_PREPARE only, when deferred triggers have run and aborting is
 * still possible.  No state outlives the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "errors.h"
#include "relaynote.h"
#include "wakeup.h"
#include "xact.h"

typedef struct Mark
{
	dlist_node node;
	text *scope;
	text *key;	  /* NULL: a batch, or nothing was granted */
	bool granted; /* may this transaction write in the scope? */
	SubTransactionId madeIn;
} Mark;

typedef struct PassedToken
{
	dlist_node node;
	int64 token;
	KeyName name;				/* of its operation; no scope: the call failed before it was read */
	SubTransactionId grantedIn; /* invalid: another transaction claimed */
	SubTransactionId provenIn;	/* invalid: unproven */
} PassedToken;

static dlist_head claims = DLIST_STATIC_INIT(claims);
static dlist_head marks = DLIST_STATIC_INIT(marks);
static dlist_head tokens = DLIST_STATIC_INIT(tokens);

/* The operation that the transaction turned out not to own; its scope is NULL while there is none.
 */
static KeyName doomedBy;
static int doomedWith; /* the SQLSTATE */

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
 * OpenClaimAdd notes that the current subtransaction claimed "name", with the
 * lease that "token" names, or without one.  All is copied.  The caller holds the key's lock.
 */
void
OpenClaimAdd(const KeyName *name, const bytea *fingerprint, const Retention *retention,
			 const KeyVersion *seen, int64 token)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	OpenClaim *claim = palloc0(sizeof(OpenClaim));

	KeyNameCopy(name, &claim->name);
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
ForgetClaim(OpenClaim *claim)
{
	dlist_delete(&claim->node);
	pfree(claim->name.scope);
	pfree(claim->name.key);
	if (claim->fingerprint != NULL)
		pfree(claim->fingerprint);
	pfree(claim);
}

/*
 * OpenClaimClose notes that the claim is completed, failed or released.  The
 * pointer is dead afterwards.
 */
void
OpenClaimClose(OpenClaim *claim)
{
	claim->closedIn = GetCurrentSubTransactionId();
	if (claim->closedIn == claim->openedIn)
		ForgetClaim(claim);
}

/* ----------------------------------------------------------------
 * Scope marks
 * ----------------------------------------------------------------
 */

static void
ForgetMark(Mark *mark)
{
	dlist_delete(&mark->node);
	pfree(mark->scope);
	if (mark->key != NULL)
		pfree(mark->key);
	pfree(mark);
}

/*
 * ForgetMarkOf forgets the mark of "scope" made in one subtransaction, of the
 * marks from "from" on; there is at most one.
 */
static void
ForgetMarkOf(const text *scope, SubTransactionId madeIn, dlist_node *from)
{
	for (dlist_node *node = from; node != &marks.head; node = node->next)
	{
		Mark *mark = dlist_container(Mark, node, node);

		if (mark->madeIn == madeIn && TextEquals(mark->scope, scope))
		{
			ForgetMark(mark);
			return;
		}
	}
}

/*
 * ScopeMark notes what the latest call about "scope" came to: "granted" says
 * whether writes that belong to it may follow, and "key" for which key.
 */
void
ScopeMark(const text *scope, const text *key, bool granted)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	Mark *mark = palloc(sizeof(Mark));

	mark->scope = TextCopy(scope);
	mark->key = granted ? TextCopy(key) : NULL;
	mark->granted = granted;
	mark->madeIn = GetCurrentSubTransactionId();
	if (!dlist_is_empty(&marks))
		ForgetMarkOf(scope, mark->madeIn, dlist_head_node(&marks));
	dlist_push_head(&marks, &mark->node);
	MemoryContextSwitchTo(caller);
}

/*
 * MatchesScope tells whether "pattern", which may end in "*", means "scope".
 */
static bool
MatchesScope(const char *pattern, const text *scope)
{
	size_t length = strlen(pattern);
	size_t bytes = VARSIZE_ANY_EXHDR(scope);

	if (length > 0 && pattern[length - 1] == '*')
		return bytes >= length - 1 && memcmp(pattern, VARDATA_ANY(scope), length - 1) == 0;
	return bytes == length && memcmp(pattern, VARDATA_ANY(scope), length) == 0;
}

/*
 * ScopeGranted tells whether the last call about a scope that "pattern" means
 * granted a claim.  "asked" is set to whether there was such a call.
 */
bool
ScopeGranted(const char *pattern, bool *asked)
{
	dlist_iter iter;

	dlist_foreach (iter, &marks)
	{
		Mark *mark = dlist_container(Mark, node, iter.cur);

		if (MatchesScope(pattern, mark->scope))
		{
			*asked = true;
			return mark->granted;
		}
	}
	*asked = false;
	return false;
}

/*
 * ScopeCurrentKey returns the key that this transaction claimed last in
 * "scope", or NULL if the last call there granted none.  It is not a copy.
 */
const text *
ScopeCurrentKey(const text *scope)
{
	dlist_iter iter;

	dlist_foreach (iter, &marks)
	{
		Mark *mark = dlist_container(Mark, node, iter.cur);

		if (TextEquals(mark->scope, scope))
			return mark->key;
	}
	return NULL;
}

/*
 * LastGrantedClaim tells whether a claim was granted, in any scope, and sets the last
 * one.  They are not copies.
 */
bool
LastGrantedClaim(const text **scope, const text **key)
{
	dlist_iter iter;

	dlist_foreach (iter, &marks)
	{
		const Mark *mark = dlist_container(Mark, node, iter.cur);

		if (mark->granted && mark->key != NULL)
		{
			*scope = mark->scope;
			*key = mark->key;
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
ForgetToken(PassedToken *passed)
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
 * TokenGranted notes that the current subtransaction claimed with a lease, under a new
 * token: its row is written, and its key locked.  A rollback of the claim forgets the token.
 */
void
TokenGranted(int64 token)
{
	PassedToken *passed = TokenAdd(token);

	passed->grantedIn = GetCurrentSubTransactionId();
	passed->provenIn = passed->grantedIn;
}

/*
 * TokenPassed notes that a function was called with "token", for the operation "name"
 * or, while that is not known, NULL: the transaction cannot commit until
 * TokenProven() says that it is the current one.
 */
void
TokenPassed(int64 token, const KeyName *name)
{
	PassedToken *passed = TokenFind(token);

	if (passed == NULL)
		passed = TokenAdd(token);
	if (name != NULL && passed->name.scope == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);

		KeyNameCopy(name, &passed->name);
		MemoryContextSwitchTo(caller);
	}
}

/*
 * TokenProven notes that "token", passed before, is current, and that the current
 * subtransaction has written the row that bears it.
 */
void
TokenProven(int64 token)
{
	PassedToken *passed = TokenFind(token);

	Assert(passed != NULL);
	if (passed->provenIn == InvalidSubTransactionId)
		passed->provenIn = GetCurrentSubTransactionId();
}

/*
 * TokenIsHeld tells whether "token", of a lease in progress, is proven: this transaction
 * owns the operation, and nothing but the end of the transaction, or a rollback to
 * a savepoint, takes that away.
 */
bool
TokenIsHeld(int64 token)
{
	const PassedToken *passed = TokenFind(token);

	return passed != NULL && passed->provenIn != InvalidSubTransactionId;
}

/*
 * AnyTokenPassed tells whether the transaction has to do with leases at all.
 */
bool
AnyTokenPassed(void)
{
	return !dlist_is_empty(&tokens);
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

static void
AbortClaims(SubTransactionId aborted)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify (iter, &claims)
	{
		OpenClaim *claim = dlist_container(OpenClaim, node, iter.cur);

		if (claim->openedIn == aborted)
			ForgetClaim(claim);
		else if (claim->closedIn == aborted)
			claim->closedIn = InvalidSubTransactionId;
	}
}

static void
PromoteClaims(SubTransactionId child, SubTransactionId parent)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify (iter, &claims)
	{
		OpenClaim *claim = dlist_container(OpenClaim, node, iter.cur);

		if (claim->openedIn == child)
			claim->openedIn = parent;
		if (claim->closedIn == child)
			claim->closedIn = parent;
		if (claim->closedIn == claim->openedIn)
			ForgetClaim(claim);
	}
}

/*
 * AbortMarks and PromoteMarks look at the newest marks only: those of the
 * subtransaction that ends lie in front of all others.
 */
static void
AbortMarks(SubTransactionId aborted)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify (iter, &marks)
	{
		Mark *mark = dlist_container(Mark, node, iter.cur);

		if (mark->madeIn != aborted)
			break;
		ForgetMark(mark);
	}
}

static void
PromoteMarks(SubTransactionId child, SubTransactionId parent)
{
	dlist_iter iter;

	dlist_foreach (iter, &marks)
	{
		Mark *mark = dlist_container(Mark, node, iter.cur);

		if (mark->madeIn != child)
			break;
		/* The parent's own mark of the scope is covered for good. */
		ForgetMarkOf(mark->scope, parent, iter.cur->next);
		mark->madeIn = parent;
	}
}

static void
AbortTokens(SubTransactionId aborted)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify (iter, &tokens)
	{
		PassedToken *passed = dlist_container(PassedToken, node, iter.cur);

		if (passed->grantedIn == aborted)
			ForgetToken(passed);
		else if (passed->provenIn == aborted)
			passed->provenIn = passed->grantedIn;
	}
}

static void
PromoteTokens(SubTransactionId child, SubTransactionId parent)
{
	dlist_iter iter;

	dlist_foreach (iter, &tokens)
	{
		PassedToken *passed = dlist_container(PassedToken, node, iter.cur);

		if (passed->grantedIn == child)
			passed->grantedIn = parent;
		if (passed->provenIn == child)
			passed->provenIn = parent;
	}
}

static void
SubTransactionCallback(SubXactEvent event, SubTransactionId child, SubTransactionId parent,
					   void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		AbortClaims(child);
		AbortMarks(child);
		AbortTokens(child);
		RelayAtSubAbort(child);
	}
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		PromoteClaims(child, parent);
		PromoteMarks(child, parent);
		PromoteTokens(child, parent);
		RelayAtSubCommit(child, parent);
	}
}

/* ----------------------------------------------------------------
 * The end of the transaction
 * ----------------------------------------------------------------
 */

/*
 * DoomTransaction makes sure that the current transaction cannot commit, even
 * if the error that the caller throws next, with the same SQLSTATE, is caught.
 */
void
DoomTransaction(const KeyName *name, int sqlstate)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);

	if (doomedBy.scope == NULL)
	{
		KeyNameCopy(name, &doomedBy);
		doomedWith = sqlstate;
	}
	MemoryContextSwitchTo(caller);
}

/*
 * CheckMayEnd throws IK410, IK412 or IK428 if the transaction must not commit.
 */
static void
CheckMayEnd(bool preparing)
{
	const PassedToken *unproven = UnprovenToken();
	const KeyName *oldest = NULL;
	int open = 0;
	dlist_iter iter;

	if (doomedBy.scope != NULL)
		ErrorTransactionDoomed(&doomedBy, doomedWith);
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
		ErrorNotCompleted(oldest, open, preparing, IsTransactionBlock());
}

/*
 * CheckClaims throws IK410, IK412 or IK428 if the transaction could not commit now.
 */
void
CheckClaims(void)
{
	CheckMayEnd(false);
}

/*
 * TransactionIsDoomed tells whether a call found that the transaction does not own an
 * operation, or could not tell.
 */
bool
TransactionIsDoomed(void)
{
	return doomedBy.scope != NULL || UnprovenToken() != NULL;
}

/*
 * ForgetAll forgets the transaction; the memory itself goes with
 * TopTransactionContext.
 */
static void
ForgetAll(void)
{
	dlist_init(&claims);
	dlist_init(&marks);
	dlist_init(&tokens);
	doomedBy.scope = NULL;
}

static void
TransactionCallback(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			CheckMayEnd(false);
			break;
		case XACT_EVENT_PRE_PREPARE:
			CheckMayEnd(true);
			break;
		case XACT_EVENT_COMMIT:
			WakeupAtCommit();
			RelayAtCommit();
			ForgetAll();
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			WakeupAtAbort();
			RelayAtAbort();
			ForgetAll();
			break;
		case XACT_EVENT_PARALLEL_PRE_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PARALLEL_ABORT:
			/* Parallel workers claim nothing: the functions are PARALLEL UNSAFE. */
			break;
	}
}

/*
 * TransactionStateInit registers the callbacks; called once per backend.
 */
void
TransactionStateInit(void)
{
	RegisterXactCallback(TransactionCallback, NULL);
	RegisterSubXactCallback(SubTransactionCallback, NULL);
}
