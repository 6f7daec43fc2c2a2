/*-------------------------------------------------------------------------
 *
 * transaction.h
 *	  Attempts that claim in one statement and complete in another.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_TRANSACTION_H
#define STRESS_TRANSACTION_H

#include "attempt.h"

extern void AttemptTransaction(Attempt *attempt);

#endif /* STRESS_TRANSACTION_H */
