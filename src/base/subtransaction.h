/*-------------------------------------------------------------------------
 *
 * base/subtransaction.h
 *	  Running code in a subtransaction.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_SUBTRANSACTION_H
#define IDEMPOTENCY_BASE_SUBTRANSACTION_H

typedef void SubtransactionBody(void *argument);

extern ErrorData *SubtransactionRun(SubtransactionBody *body, void *argument);

#endif /* IDEMPOTENCY_BASE_SUBTRANSACTION_H */
