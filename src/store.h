/*-------------------------------------------------------------------------
 *
 * store.h
 *	  The key store: what is remembered of each operation.
 *
 * Nothing outside store.c knows how the rows are laid out.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_H
#define IDEMPOTENCY_STORE_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"

#include "keyname.h"

/* What a look at the store finds under a name. */
typedef enum KeyState
{
	KEY_ABSENT,
	KEY_EXPIRED, /* there is a row, and it counts as absent */
	KEY_STORED
} KeyState;

/* One version of one row, so that nobody overwrites another than he saw. */
typedef struct KeyVersion
{
	ItemPointerData tid; /* invalid: there was no row */
	TransactionId xmin;
	uint64 asOf; /* how many transactions had ended when we looked */
} KeyVersion;

/* What is remembered; a NULL pointer is an SQL NULL. */
typedef struct StoredOutcome
{
	TimestampTz expiresAt;
	bytea *fingerprint;
	bool hasStatus; /* an inbox record has none */
	int32 status;
	bool failed;
	text *headers;
	text *response;
} StoredOutcome;

typedef struct KeyStoreBatch KeyStoreBatch;

extern KeyState KeyStoreProbe(const KeyName *name, StoredOutcome *outcome, KeyVersion *version);
extern bool KeyStoreUnchanged(const KeyVersion *seen);
extern bool KeyStoreRead(const KeyName *name, StoredOutcome *outcome);
extern void KeyStoreWrite(const KeyName *name, const KeyVersion *seen,
						  const StoredOutcome *outcome);
extern void KeyStoreDelete(const KeyName *name, const KeyVersion *seen);

extern KeyStoreBatch *KeyStoreBatchBegin(void);
extern bool KeyStoreBatchInsert(KeyStoreBatch *batch, const KeyName *name, TimestampTz expiresAt);
extern void KeyStoreBatchEnd(KeyStoreBatch *batch);

#endif /* IDEMPOTENCY_STORE_H */
