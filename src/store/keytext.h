/*-------------------------------------------------------------------------
 *
 * store/keytext.h
 *	  The type idempotency.keytext: a key as it is stored.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_KEYTEXT_H
#define IDEMPOTENCY_STORE_KEYTEXT_H

#include "fmgr.h"

extern bytea *KeyTextPack(const text *key);
extern text *KeyTextUnpack(const bytea *stored);

#endif /* IDEMPOTENCY_STORE_KEYTEXT_H */
