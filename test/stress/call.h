/*-------------------------------------------------------------------------
 *
 * call.h
 *	  Attempts that are one call.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_CALL_H
#define STRESS_CALL_H

#include "attempt.h"

extern void AttemptProcedure(Attempt *attempt);
extern void AttemptRun(Attempt *attempt);
extern void AttemptAnotherRequest(Attempt *attempt);
extern void AttemptWithoutClaim(Attempt *attempt);
extern void AttemptEach(Attempt *attempt);
extern bool AttemptFinal(Attempt *attempt, int key);

#endif /* STRESS_CALL_H */
