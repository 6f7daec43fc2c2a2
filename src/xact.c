/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  What the current transaction has claimed, how that follows savepoints,
 *	  and the guard at commit.
 *
 * Two lists live in TopTransactionContext, newest first:
 *
 * - Open claims.  Each knows the subtransaction that opened it and the one
 *	 that closed it.  A rollback of the first drops the claim, a rollback of
 *	 the second opens it again; a release hands both to the parent.  When both
 *	 are the same, nothing can open the claim again, and it is forgotten.
 *
 * - Scope marks: what the last call about each scope was granted, for
 *	 require_claim() and current_key().  A rollback uncovers the mark before.
 *
 * A claim without a lease that is still open when the transaction wants to
 * commit or to be prepared is an error (IK428), and so is a lost claim, caught or not (IK410).
 * Errors are thrown from PRE_COMMIT and PRE_PREPARE only, when deferred triggers have run and
 *aborting is still possible.  No state outlives the transaction.
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

static dlist_head claims = DLIST_STATIC_INIT(claims);
static dlist_head marks = DLIST_STATIC_INIT(marks);

/* The operation whose claim was lost; its scope is NULL while none is. */
static KeyName doomedBy;
static bool doubted = false;	   /* ... or may be: TrustTransaction() will tell */
static SubTransactionId doubtedIn; /* where the doubt began: what fails deeper says nothing */

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
SubTransactionCallback(SubXactEvent event, SubTransactionId child, SubTransactionId parent,
					   void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		AbortClaims(child);
		AbortMarks(child);
		if (child == doubtedIn)
			doubted = false; /* whoever was to find out did not: the doom stays */
	}
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		PromoteClaims(child, parent);
		PromoteMarks(child, parent);
	}
}

/* ----------------------------------------------------------------
 * The end of the transaction
 * ----------------------------------------------------------------
 */

/*
 * DoomTransaction makes sure that the current transaction cannot commit, even
 * if the error that the caller throws next is caught.
 */
void
DoomTransaction(const KeyName *name)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);

	if (doomedBy.scope == NULL)
		KeyNameCopy(name, &doomedBy);
	doubted = false;
	MemoryContextSwitchTo(caller);
}

/*
 * DoubtTransaction dooms the current transaction until TrustTransaction() says
 * otherwise.  In between stands what finds out whether the caller owns the
 * operation: any error there leaves that open, and what is written without an
 * owner must not commit.
 */
void
DoubtTransaction(const KeyName *name)
{
	bool sure = doomedBy.scope != NULL;

	DoomTransaction(name);
	doubted = !sure;
	doubtedIn = GetCurrentSubTransactionId();
}

/*
 * TrustTransaction ends the doubt; a transaction that was doomed before it
 * stays so.
 */
void
TrustTransaction(void)
{
	if (!doubted)
		return;
	pfree(doomedBy.scope);
	pfree(doomedBy.key);
	doomedBy.scope = NULL;
	doubted = false;
}

/*
 * CheckMayEnd throws IK410 or IK428 if the transaction must not commit.
 */
static void
CheckMayEnd(bool preparing)
{
	const KeyName *oldest = NULL;
	int open = 0;
	dlist_iter iter;

	if (doomedBy.scope != NULL)
		ErrorTransactionDoomed(&doomedBy);

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
 * CheckClaims throws IK410 or IK428 if the transaction could not commit now.
 */
void
CheckClaims(void)
{
	CheckMayEnd(false);
}

/*
 * TransactionIsDoomed tells whether it can never commit.
 */
bool
TransactionIsDoomed(void)
{
	return doomedBy.scope != NULL;
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
	doomedBy.scope = NULL;
	doubted = false;
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
