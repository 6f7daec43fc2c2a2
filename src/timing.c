/*-------------------------------------------------------------------------
 *
 * timing.c
 *	  The intervals that callers pass: how long to wait for the owner of a
 *	  key, and how long an outcome is remembered.
 *
 * NULL means the setting.  A negative length is 22023, one beyond the last
 * timestamp 22008.  Takes no locks, touches no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>
#include <math.h>

#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "errors.h"
#include "guc.h"
#include "timing.h"

/*
 * IntervalMicroseconds returns about how long an interval is, a month being
 * 30 days.  It is a double, since an interval's parts overflow an int64.
 */
static double
IntervalMicroseconds(const Interval *interval)
{
	return (double) interval->time +
		   ((double) interval->month * DAYS_PER_MONTH + interval->day) * USECS_PER_DAY;
}

/*
 * WaitFromArg returns the wait that argument "arg" passes, in milliseconds.
 * The longest is 24 days, which is what an infinite one means.
 */
int
WaitFromArg(FunctionCallInfo fcinfo, int arg, int defaultMs)
{
	double ms;

	if (PG_ARGISNULL(arg))
		return defaultMs;

	ms = IntervalMicroseconds(PG_GETARG_INTERVAL_P(arg)) / 1000;
	if (ms < 0)
		ErrorBadArgument("wait must not be negative",
						 "Pass 0 to wait not at all, or NULL for idempotency.wait.");

	/* Less than a millisecond is still a wait. */
	return ms >= INT_MAX ? INT_MAX : (int) ceil(ms);
}

/*
 * RetentionFromArg returns the retention that argument "arg" passes.  For
 * ever is -1 second, as in the setting, or infinity where the server has it.
 */
Retention
RetentionFromArg(FunctionCallInfo fcinfo, int arg)
{
	Retention retention = {.forever = false};

	if (PG_ARGISNULL(arg))
	{
		retention.forever = DefaultRetention < 0;
		retention.length.time = DefaultRetention * USECS_PER_SEC;
		return retention;
	}

	retention.length = *PG_GETARG_INTERVAL_P(arg);
	retention.forever = INTERVAL_IS_NOEND(&retention.length) ||
						IntervalMicroseconds(&retention.length) == -USECS_PER_SEC;

	/* what is no retention is better said now than when the work is done */
	(void) RetentionEnd(&retention);
	return retention;
}

/*
 * RetentionEnd returns when an outcome that is stored now will be forgotten.
 * Throws 22008 if that is no timestamp, and 22023 if it is not in the future:
 * how long a month or a day is depends on when it begins.
 */
TimestampTz
RetentionEnd(const Retention *retention)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz end;

	if (retention->forever)
		return DT_NOEND;
	if (retention->length.month == 0 && retention->length.day == 0 &&
		retention->length.time < (int64) INT_MAX * USECS_PER_SEC)
		end = now + retention->length.time;
	else
		end = DatumGetTimestampTz(
			DirectFunctionCall2(timestamptz_pl_interval, TimestampTzGetDatum(now),
								IntervalPGetDatum(unconstify(Interval *, &retention->length))));
	if (end <= now)
		ErrorBadArgument("retention must be positive",
						 "Pass '-1 second' to remember for ever, or NULL for "
						 "idempotency.retention.");
	return end;
}
