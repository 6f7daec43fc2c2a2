/*-------------------------------------------------------------------------
 *
 * query/reevaluation.h
 *	  Calls that write run once for each row, or are refused.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_QUERY_REEVALUATION_H
#define IDEMPOTENCY_QUERY_REEVALUATION_H

#include "fmgr.h"

extern void ReevaluationInit(void);
extern void PreventUnsafeCall(FunctionCallInfo fcinfo, const char *function);

#endif /* IDEMPOTENCY_QUERY_REEVALUATION_H */
