/*-------------------------------------------------------------------------
 *
 * relaynote.h
 *	  What the relay is to be told when this transaction commits.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYNOTE_H
#define IDEMPOTENCY_RELAYNOTE_H

#include "postgres_ext.h"

extern void RelayAfterPublish(void);
extern void RelayAfterSubscribe(int64 number, Oid owner);
extern void RelayAfterUnsubscribe(int64 number);
extern void RelayAfterRedrive(int64 number);

extern bool RelayHasNotes(void);
extern void RelayAtCommit(void);
extern void RelayAtAbort(void);

#endif /* IDEMPOTENCY_RELAYNOTE_H */
