/*-------------------------------------------------------------------------
 *
 * settings/timing.h
 *	  Elapsed time, and the intervals that callers pass: wait, retention and lease.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_TIMING_H
#define IDEMPOTENCY_SETTINGS_TIMING_H

#include "datatype/timestamp.h"
#include "fmgr.h"
#include "portability/instr_time.h"

typedef struct Retention
{
	bool forever;
	Interval length;
} Retention;

/* In milliseconds, it fits into an int. */
#define LONGEST_WAIT_DAYS 24

extern long MillisecondsSince(instr_time began);
extern int WaitFromArg(FunctionCallInfo fcinfo, int arg, int defaultMs);
extern Retention RetentionFromArg(FunctionCallInfo fcinfo, int arg, const text *scope);
extern TimestampTz RetentionEnd(const Retention *retention, TimestampTz from);
extern const Interval *LeaseFromArg(FunctionCallInfo fcinfo, int arg);
extern TimestampTz LeaseEnd(const Interval *lease, TimestampTz from);

#endif /* IDEMPOTENCY_SETTINGS_TIMING_H */
