/*-------------------------------------------------------------------------
 *
 * store.h
 *	  The key store: what is remembered of each operation.
 *
 * Nothing outside the rooms of the store knows how the rows are laid out: keyrow.c
 * says it, store.c looks, storewrite.c and storebatch.c write, storescan.c reaps.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_H
#define IDEMPOTENCY_STORE_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"

#include "keyname.h"
#include "timing.h"

/* What a look at the store finds under a name. */
typedef enum KeyState
{
	KEY_ABSENT,
	KEY_EXPIRED,   /* there is a row, and it counts as absent */
	KEY_LEASED,	   /* in progress, and its owner's lease runs */
	KEY_ABANDONED, /* in progress, and the lease is over, or was given up */
	KEY_STORED	   /* finished */
} KeyState;

/* One version of one row, so that nobody overwrites another than he saw. */
typedef struct KeyVersion
{
	Oid table;			 /* where we looked */
	ItemPointerData tid; /* invalid: there was no row */
	TransactionId xmin;
	uint64 asOf; /* how many transactions had ended when we looked */
} KeyVersion;

/* An operation in progress whose claim survives commit.  NULL is an SQL NULL. */
typedef struct Lease
{
	int64 token; /* 0: there is no lease */
	int32 attempt;
	TimestampTz from;
	TimestampTz until;
	text *recoveryPoint;
	text *state;
	text *request;
	Retention retention; /* of the outcome, and of the row when the lease is over */
} Lease;

/* What is remembered; a NULL pointer is an SQL NULL. */
typedef struct StoredOutcome
{
	TimestampTz expiresAt;
	bytea *fingerprint;
	bool hasStatus; /* an inbox record has none, nor has a lease */
	int32 status;
	bool failed;
	text *headers;
	text *response;
	int64 finishedBy; /* token of the owner that finished it; 0: it had no lease */
	Lease lease;
} StoredOutcome;

/* Which parts of a row in progress KeyStoreChangeLease() sets. */
typedef enum LeasePart
{
	LEASE_OWNER = 1,	  /* token, attempt and retention */
	LEASE_TIMES = 2,	  /* from, until, and the row's expiry */
	LEASE_CHECKPOINT = 4, /* recovery point and state */
	LEASE_REQUEST = 8	  /* fingerprint and request */
} LeasePart;

typedef struct KeyStoreBatch KeyStoreBatch;
typedef struct AbandonedScan AbandonedScan;

extern KeyState KeyStoreProbe(const KeyName *name, StoredOutcome *outcome, KeyVersion *version);
extern bool KeyStoreUnchanged(const KeyVersion *seen);
extern void KeyStoreLetGo(const KeyVersion *seen);
extern KeyState KeyStoreRead(const KeyName *name, StoredOutcome *outcome);

extern void KeyStoreWrite(const KeyName *name, const KeyVersion *seen,
						  const StoredOutcome *outcome);
extern void KeyStoreChangeLease(const KeyName *name, const KeyVersion *seen,
								const StoredOutcome *changed, int parts);
extern void KeyStoreDelete(const KeyName *name, const KeyVersion *seen);

extern AbandonedScan *KeyStoreAbandonedBegin(const text *scope);
extern bool KeyStoreAbandonedNext(AbandonedScan *scan, KeyName *name);
extern void KeyStoreAbandonedEnd(AbandonedScan *scan);

extern KeyStoreBatch *KeyStoreBatchBegin(void);
extern bool KeyStoreBatchInsert(KeyStoreBatch *batch, const KeyName *name,
								const Retention *retention);
extern void KeyStoreBatchEnd(KeyStoreBatch *batch);

#endif /* IDEMPOTENCY_STORE_H */
