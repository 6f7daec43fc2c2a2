/*-------------------------------------------------------------------------
 *
 * settings/timing.c
 *	  Elapsed time, and the intervals that callers pass: wait, retention and lease.
 *
 * A negative length is 22023, and so is one that is a mistake: a driver sent nanoseconds or
 * milliseconds as a bare number, which is seconds.  Only one that ends before the first
 * timestamp is 22008: the limits keep any other from the last.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>
#include <math.h>

#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "settings/guc.h"
#include "settings/timing.h"

#define LONGEST_LEASE_DAYS 24
#define LONGEST_RETENTION_YEARS 100

/*
 * MillisecondsSince returns how many milliseconds have passed, by a monotonic clock.
 */
long
MillisecondsSince(instr_time began)
{
	instr_time elapsed;

	INSTR_TIME_SET_CURRENT(elapsed);
	INSTR_TIME_SUBTRACT(elapsed, began);
	return (long) INSTR_TIME_GET_MILLISEC(elapsed);
}

/*
 * IntervalMicroseconds returns the approximate length of an interval, with months of 30
 * days, as a double: the parts of an interval can overflow an int64.
 */
static double
IntervalMicroseconds(const Interval *interval)
{
	return (double) interval->time +
		   ((double) interval->month * DAYS_PER_MONTH + interval->day) * USECS_PER_DAY;
}

/*
 * RefuseTooLong throws 22023 for an interval above so many days; "what" and "longest" name
 * both in the message.  A year has 365.25 days, as in extract(epoch).
 */
static void
RefuseTooLong(const Interval *interval, double days, const char *what, const char *longest)
{
	int years = interval->month / MONTHS_PER_YEAR;

	if (IntervalMicroseconds(interval) +
			years * (DAYS_PER_YEAR - MONTHS_PER_YEAR * DAYS_PER_MONTH) * USECS_PER_DAY >
		days * USECS_PER_DAY)
		ErrorBadArgument(psprintf("%s must be at most %s", what, longest),
						 psprintf("Pass at most %s. A number without a unit is seconds: pass a "
								  "unit, such as '30 s'.",
								  longest));
}

/*
 * WaitFromArg returns the wait that argument "arg" passes, in milliseconds.
 */
int
WaitFromArg(FunctionCallInfo fcinfo, int arg, int defaultMs)
{
	double ms;

	if (PG_ARGISNULL(arg))
		return defaultMs;

	RefuseTooLong(PG_GETARG_INTERVAL_P(arg), LONGEST_WAIT_DAYS, "wait", "24 days");
	ms = IntervalMicroseconds(PG_GETARG_INTERVAL_P(arg)) / 1000;
	if (ms < 0)
		ErrorBadArgument("wait must not be negative",
						 "Pass 0 to not wait, or NULL for idempotency.wait.");

	/* a fraction of a millisecond is a wait too */
	return (int) ceil(ms);
}

/*
 * RetentionFromArg returns the retention that argument "arg" passes, or that of the scope.
 * Forever is -1 second, as in the setting, or infinity where the server has it.  For NULL,
 * throws what SettingRetention() throws.
 */
Retention
RetentionFromArg(FunctionCallInfo fcinfo, int arg, const text *scope)
{
	Retention retention;

	if (PG_ARGISNULL(arg))
		return SettingRetention(&RetentionSetting, scope);

	retention.length = *PG_GETARG_INTERVAL_P(arg);
	retention.forever = INTERVAL_IS_NOEND(&retention.length) ||
						IntervalMicroseconds(&retention.length) == -USECS_PER_SEC;

	/* refuse an invalid retention before the operation runs */
	if (!retention.forever)
		RefuseTooLong(&retention.length, LONGEST_RETENTION_YEARS * DAYS_PER_YEAR, "retention",
					  "100 years");
	(void) RetentionEnd(&retention, GetCurrentTimestamp());
	return retention;
}

/*
 * Later returns "from" plus an interval; the length of a month or a day depends on
 * "from".  Throws 22008 if that is no timestamp.
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
 * RetentionEnd returns when an outcome that is stored at "from" expires.  Throws 22008,
 * and 22023 if that is not later.
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
						 "Pass '-1 second' to retain it forever, or NULL for the default.");
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
	RefuseTooLong(lease, LONGEST_LEASE_DAYS, "lease", "24 days");
	(void) LeaseEnd(lease, GetCurrentTimestamp());
	return lease;
}

/*
 * LeaseEnd returns when a lease that begins at "from" ends.  Throws 22008, and 22023
 * unless that is later and finite: a dead owner would block its key forever.
 */
TimestampTz
LeaseEnd(const Interval *lease, TimestampTz from)
{
	TimestampTz end = Later(from, lease);

	if (end <= from || TIMESTAMP_NOT_FINITE(end))
		ErrorBadArgument(
			"lease must be positive and finite",
			"Pass the time within which the owner renews the lease, such as '30 seconds'.");
	return end;
}
