/*-------------------------------------------------------------------------
 *
 * keys/transaction.h
 *	  What the current transaction has claimed.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_TRANSACTION_H
#define IDEMPOTENCY_KEYS_TRANSACTION_H

#include "lib/ilist.h"

#include "base/name.h"
#include "settings/timing.h"
#include "store/store.h"

/* A claim that this transaction holds and has not finished. */
typedef struct OpenClaim
{
	dlist_node node;
	KeyName name;
	bytea *fingerprint; /* NULL: the request was not given */
	Retention retention;
	KeyVersion seen; /* the row to overwrite, if any; of a lease, out of date */
	int64 token;	 /* 0: no lease; the claim must be finished before commit */
	SubTransactionId openedIn;
	SubTransactionId closedIn; /* invalid while open */
} OpenClaim;

extern OpenClaim *OpenClaimFind(const KeyName *name);
extern bool AnyClaimOpen(void);
extern void OpenClaimAdd(const KeyName *name, const bytea *fingerprint, const Retention *retention,
						 const KeyVersion *seen, int64 token);
extern void OpenClaimClose(OpenClaim *claim);

extern void ScopeSetResult(const text *scope, const text *key, bool granted);
extern void ScopeSetReplayed(const text *scope, const text *key);
extern bool ScopeReplayed(const KeyName *name);
extern bool ScopeGranted(const text *pattern, bool *asked);
extern const text *ScopeCurrentKey(const text *scope);
extern void ScopeForgetResults(void);
extern bool LastGrantedClaim(const text **scope, const text **key);

extern void TokenGranted(int64 token);
extern void TokenPassed(int64 token, const KeyName *name);
extern void TokenProven(int64 token);
extern bool AnyTokenPassed(void);
extern bool OperationIsMine(const KeyName *name, int64 token);

extern void PreventCommit(const KeyName *name, int sqlstate);
extern bool TransactionMustAbort(void);
extern void CheckMayCommit(bool preparing);

extern void TransactionStateInit(void);

#endif /* IDEMPOTENCY_KEYS_TRANSACTION_H */
