/*-------------------------------------------------------------------------
 *
 * deferred.h
 *	  Deferred triggers and constraints, before the transaction ends.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DEFERRED_H
#define IDEMPOTENCY_DEFERRED_H

extern void DeferredInit(void);
extern void DeferredBegin(void);
extern void DeferredEnd(void);

#endif /* IDEMPOTENCY_DEFERRED_H */
