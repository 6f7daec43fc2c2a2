/*-------------------------------------------------------------------------
 *
 * outboxerrors.h
 *	  The errors of publishing and delivery that users see: one function each.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXERRORS_H
#define IDEMPOTENCY_OUTBOXERRORS_H

#include "compat.h"
#include "event.h"

/* IK408 */
pg_noreturn extern void ErrorBatchLost(const text *subscription, int64 batch);

/* 22023 */
pg_noreturn extern void ErrorEventNotInBatch(const text *subscription, int64 batch);

/* 25001 */
pg_noreturn extern void ErrorFetchSnapshot(void);

/* 40001 */
pg_noreturn extern void ErrorPositionChanged(const text *subscription);

pg_noreturn extern void ErrorEventHandlerOwner(Oid handler, Oid functionOwner, Oid owner);
pg_noreturn extern void ErrorEventHandlerReplaced(const char *handler);

/* 42501 */
pg_noreturn extern void ErrorNotSubscriptionOwner(const text *subscription, const char *owner);
pg_noreturn extern void ErrorOwnerForbidden(const char *owner);
pg_noreturn extern void ErrorOwnerSuperuser(const char *owner);
pg_noreturn extern void ErrorOwnerNoLogin(const char *owner);

/* 42704 */
pg_noreturn extern void ErrorNoSubscription(const text *subscription);

/* 42883 */
pg_noreturn extern void ErrorEventHandlerMissing(const char *handler);

/* 42P13 */
pg_noreturn extern void ErrorEventHandlerSignature(Oid handler);

/* 55000 */
pg_noreturn extern void ErrorHasHandler(const text *subscription, const char *handler);
pg_noreturn extern void ErrorNumbersBehind(const text *subscription, int64 passed, int64 last);

/* 55P03 */
pg_noreturn extern void ErrorSubscriptionBusy(const text *subscription);
extern void WarnNoRelayPlace(int places);
pg_noreturn extern void ErrorPublishersBusy(void);
pg_noreturn extern void ErrorReaperBusy(void);

#endif /* IDEMPOTENCY_OUTBOXERRORS_H */
