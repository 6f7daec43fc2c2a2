/*-------------------------------------------------------------------------
 *
 * deferred.h
 *	  Deferred triggers and constraints, before the transaction ends.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DEFERRED_H
#define IDEMPOTENCY_DEFERRED_H

extern void DeferredCheck(void);

#endif /* IDEMPOTENCY_DEFERRED_H */
