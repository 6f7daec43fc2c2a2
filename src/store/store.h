/*-------------------------------------------------------------------------
 *
 * store/store.h
 *	  The key store: what is stored of each operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_STORE_H
#define IDEMPOTENCY_STORE_STORE_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"

#include "base/name.h"
#include "base/pattern.h"
#include "settings/timing.h"

/* What a probe finds under a name. */
typedef enum KeyState
{
	KEY_ABSENT,
	KEY_EXPIRED,   /* the row counts as absent */
	KEY_LEASED,	   /* in progress; the owner's lease runs */
	KEY_ABANDONED, /* in progress; the lease has expired or was released */
	KEY_STORED	   /* finished */
} KeyState;

/* A version of a row: a write replaces only the version that the caller has seen. */
typedef struct KeyVersion
{
	Oid table;
	ItemPointerData tid; /* invalid: there was no row */
	TransactionId xmin;
	uint64 endedTransactions; /* how many transactions had ended at the probe */
	TimestampTz createdAt;	  /* of its operation, which a write keeps; 0: none, or expired */
} KeyVersion;

/*
 * KeyVersionIsLive tells whether a row was seen that had not expired.
 */
static inline bool
KeyVersionIsLive(const KeyVersion *seen)
{
	return seen->createdAt != 0;
}

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
	Retention retention; /* of the outcome, and of the row once the lease has ended */
} Lease;

/* What a row stores.  NULL is an SQL NULL. */
typedef struct KeyRecord
{
	TimestampTz expiresAt;
	bytea *fingerprint;
	bool hasStatus; /* false for an inbox record and for a lease */
	int32 status;
	bool failed;
	text *headers;
	text *response;
	int64 finishedBy; /* token of the owner that finished it; 0: no lease */
	Lease lease;
} KeyRecord;

/*
 * LeaseRuns tells whether a lease from "from" until "until" runs.  It has ended if the time is
 * past its end or before its start: then the clock was set back, and how long the lease
 * has run is unknown.
 */
static inline bool
LeaseRuns(TimestampTz from, TimestampTz until, TimestampTz now)
{
	return from <= now && now <= until;
}

/* Which parts of a row in progress KeyStoreChangeLease() sets. */
typedef enum LeasePart
{
	LEASE_OWNER = 1,	  /* token, attempt and retention */
	LEASE_TIMES = 2,	  /* from, until, and the row's expiry */
	LEASE_CHECKPOINT = 4, /* recovery point and state */
	LEASE_REQUEST = 8	  /* fingerprint and request */
} LeasePart;

/* An operation that KeyStoreAbandoned() has found. */
typedef struct AbandonedKey
{
	int64 token;
	KeyName name;
} AbandonedKey;

typedef struct KeyStoreBatch KeyStoreBatch;

extern KeyState KeyStoreProbe(const KeyName *name, KeyRecord *record, KeyVersion *version);
extern bool KeyStoreUnchanged(const KeyVersion *seen);
extern void KeyStoreUnlockTable(const KeyVersion *seen);
extern KeyState KeyStoreRead(const KeyName *name, KeyRecord *record);

extern void KeyStoreWrite(const KeyName *name, const KeyVersion *seen, const KeyRecord *record);
extern void KeyStoreChangeLease(const KeyName *name, const KeyVersion *seen,
								const KeyRecord *record, int parts);
extern void KeyStoreDelete(const KeyName *name, const KeyVersion *seen);

extern int KeyStoreAbandoned(const ScopePattern *scopes, int64 after, AbandonedKey *found,
							 int limit);

extern KeyStoreBatch *KeyStoreBatchBegin(void);
extern bool KeyStoreBatchInsert(KeyStoreBatch *batch, const KeyName *name,
								const Retention *retention);
extern void KeyStoreBatchEnd(KeyStoreBatch *batch);

#endif /* IDEMPOTENCY_STORE_STORE_H */
