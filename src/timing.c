/*-------------------------------------------------------------------------
 *
 * timing.c
 *	  The intervals that callers pass: how long to wait for the owner of a
 *	  key, how long an owner may be silent, and how long an outcome is
 *	  remembered.
 *
 * A negative length is 22023, one beyond the last timestamp 22008.  Takes no
 * locks, touches no tables.
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
double
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
 * Throws what RequireSetting() does for NULL, if the setting cannot be used.
 */
Retention
RetentionFromArg(FunctionCallInfo fcinfo, int arg)
{
	Retention retention;

	if (PG_ARGISNULL(arg))
	{
		RequireSetting(&RetentionSetting);
		return DefaultRetention;
	}

	retention.length = *PG_GETARG_INTERVAL_P(arg);
	retention.forever = INTERVAL_IS_NOEND(&retention.length) ||
						IntervalMicroseconds(&retention.length) == -USECS_PER_SEC;

	/* what is no retention is better said now than when the work is done */
	(void) RetentionEnd(&retention, GetCurrentTimestamp());
	return retention;
}

/*
 * Later returns "from" and an interval.  Throws 22008 if that is no timestamp.
 * How long a month or a day is depends on when it begins.
 */
static TimestampTz
Later(TimestampTz from, const Interval *length)
{
	if (length->month == 0 && length->day == 0 && length->time < (int64) INT_MAX * USECS_PER_SEC)
		return from + length->time;
	return DatumGetTimestampTz(
		DirectFunctionCall2(timestamptz_pl_interval, TimestampTzGetDatum(from),
							IntervalPGetDatum(unconstify(Interval *, length))));
}

/*
 * RetentionEnd returns when an outcome that is stored at "from" will be
 * forgotten.  Throws 22008, and 22023 if that is not later.
 */
TimestampTz
RetentionEnd(const Retention *retention, TimestampTz from)
{
	TimestampTz end;

	if (retention->forever)
		return DT_NOEND;
	end = Later(from, &retention->length);
	if (end <= from)
		ErrorBadArgument("retention must be positive",
						 "Pass '-1 second' to remember for ever, or NULL for "
						 "idempotency.retention.");
	return end;
}

/*
 * LeaseFromArg returns the lease that argument "arg" passes, checked, or NULL.
 */
const Interval *
LeaseFromArg(FunctionCallInfo fcinfo, int arg)
{
	const Interval *lease;

	if (PG_ARGISNULL(arg))
		return NULL;
	lease = PG_GETARG_INTERVAL_P(arg);
	(void) LeaseEnd(lease, GetCurrentTimestamp());
	return lease;
}

/*
 * LeaseEnd returns when a lease that begins at "from" runs out.  Throws 22008,
 * and 22023 unless that is later and not never: a dead owner would block its
 * key for ever.
 */
TimestampTz
LeaseEnd(const Interval *lease, TimestampTz from)
{
	TimestampTz end = Later(from, lease);

	if (end <= from || TIMESTAMP_NOT_FINITE(end))
		ErrorBadArgument("lease must be positive and finite",
						 "Pass how long the owner may be silent, such as '30 seconds'.");
	return end;
}
