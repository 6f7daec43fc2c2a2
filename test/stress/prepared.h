/*-------------------------------------------------------------------------
 *
 * prepared.h
 *	  Prepared transactions, which another session finishes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_PREPARED_H
#define STRESS_PREPARED_H

#include "attempt.h"

extern bool Prepare(Attempt *attempt);
extern void *ResolverMain(void *argument);
extern void ResolverStop(void);

#endif /* STRESS_PREPARED_H */
