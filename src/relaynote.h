/*-------------------------------------------------------------------------
 *
 * relaynote.h
 *	  What the relay is to be told when this transaction commits.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYNOTE_H
#define IDEMPOTENCY_RELAYNOTE_H

#include "topic.h"

extern void RelayAfterPublish(const text *topic);
extern void RelayAfterSubscribe(int64 number, Oid owner, const TopicPatterns *patterns);
extern void RelayAfterUnsubscribe(int64 number);
extern void RelayAfterRedrive(int64 number);

extern bool RelayHasNotes(void);
extern void RelayAtSubAbort(SubTransactionId aborted);
extern void RelayAtSubCommit(SubTransactionId child, SubTransactionId parent);
extern void RelayAtCommit(void);
extern void RelayAtAbort(void);

#endif /* IDEMPOTENCY_RELAYNOTE_H */
