/*-------------------------------------------------------------------------
 *
 * setting.c
 *	  The values of settings that clients, roles and databases carry, and what
 *	  becomes of one that cannot be used.
 *
 * Where a value is set by a command, the server refuses an invalid one.  It
 * cannot where the value was stored while the library was not loaded (ALTER
 * DATABASE, ALTER ROLE, PGOPTIONS, postgresql.conf, SET): when the library is
 * loaded, or when a session starts, the server warns once and goes on with the
 * default.  The default of a setting that protects is not what was asked for: a
 * day instead of a month, all scopes instead of a tenant's.  So in those two
 * moments an invalid value is accepted and marked, and RequireSetting() throws
 * wherever the setting is needed, until it is set right.
 *
 * A duration is written as PostgreSQL's own settings are (a number, or a number
 * and a unit of them), or else as an interval of SQL.
 *
 * Takes no locks, touches no tables; nothing here but RequireSetting() throws,
 * since check hooks may run without a transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>
#include <math.h>

#include "access/parallel.h"
#include "utils/datetime.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "errors.h"
#include "setting.h"

/* No month is longer, so that nothing ends before the interval is over. */
#define DAYS_OF_A_MONTH 31

/* Are the settings being defined, so that what was set before comes in? */
static bool loadingSettings = false;

void
SettingsLoading(bool loading)
{
	loadingSettings = loading;
}

/*
 * RequireSetting throws 22023 or 42501 unless the value of a setting can be
 * used.  Call it where the value is needed.
 */
void
RequireSetting(const Setting *setting)
{
	if (setting->state != SETTING_VALID)
		ErrorSettingRefused(setting);
}

/*
 * SettingMayStay tells whether the invalid value of a setting has to be accepted
 * all the same, and warns of it: the server would keep the default instead.  A
 * parallel worker repeats what its leader has accepted.
 */
bool
SettingMayStay(const Setting *setting, const char *text, GucSource source)
{
	bool stored = source >= PGC_S_GLOBAL && source <= PGC_S_DATABASE_USER;
	bool warned = setting->state == SETTING_INVALID && strcmp(setting->text, text) == 0;

	if (!loadingSettings && !stored && !InitializingParallelWorker)
		return false;
	ereport(warned || InitializingParallelWorker ? DEBUG1 : WARNING,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid value for parameter \"%s\": \"%s\"", setting->name, text),
			 GUC_check_errdetail_string ? errdetail_internal("%s", GUC_check_errdetail_string) : 0,
			 GUC_check_errhint_string ? errhint("%s", GUC_check_errhint_string) : 0));
	return true;
}

/*
 * SettingAccept ends a check hook: it stores in "extra" what the assign hook
 * needs, and returns whether the value is accepted.
 */
bool
SettingAccept(const Setting *setting, const char *text, void **extra, GucSource source,
			  const SettingValue *value)
{
	SettingValue *copy;

	if (!value->valid && !SettingMayStay(setting, text, source))
		return false;
	copy = guc_malloc(LOG, sizeof(SettingValue));
	if (copy == NULL)
		return false;
	*copy = *value;
	*extra = copy;
	return true;
}

/*
 * ParseInterval parses an interval as interval_in() does, without its errors.
 */
static bool
ParseInterval(const char *text, Interval *interval)
{
	struct pg_itm_in parts = {0};
	char buffer[256];
	char *fields[MAXDATEFIELDS];
	int types[MAXDATEFIELDS];
	int count;
	int type = DTK_DELTA;
	int error;

	error = ParseDateTime(text, buffer, sizeof(buffer), fields, types, MAXDATEFIELDS, &count);
	if (error == 0)
		error = DecodeInterval(fields, types, count, INTERVAL_FULL_RANGE, &type, &parts);
	if (error == DTERR_BAD_FORMAT)
		error = DecodeISO8601Interval(unconstify(char *, text), &type, &parts);
	return error == 0 && type == DTK_DELTA && itmin2interval(&parts, interval) == 0;
}

/*
 * ParseDuration fills "value" from the text of a duration, and returns whether
 * the rule allows it; if not, it sets the check's detail.
 */
bool
ParseDuration(const char *text, const DurationRule *rule, SettingValue *value)
{
	bool seconds = rule->unit == GUC_UNIT_S;
	const char *nameOfUnit = seconds ? "seconds" : "milliseconds";
	int64 unit = seconds ? USECS_PER_SEC : 1000;
	int least = rule->nonzero ? 1 : 0;
	Interval *length = &value->duration.length;
	double units;
	int number;

	memset(value, 0, sizeof(SettingValue));
	if (parse_int(text, &number, rule->unit, NULL))
		length->time = number * unit;
	else if (!ParseInterval(text, length))
	{
		GUC_check_errdetail("It is not an interval.");
		GUC_check_errhint("Use an interval such as '30 days' or '90 minutes', or a number of %s.",
						  nameOfUnit);
		return false;
	}

	units =
		(length->time + ((double) length->month * DAYS_OF_A_MONTH + length->day) * USECS_PER_DAY) /
		unit;
	value->duration.forever = rule->forever && units == -1;
	if (!value->duration.forever && (units < least || units > INT_MAX))
	{
		GUC_check_errdetail("It must be from %d to %d %s%s.", least, INT_MAX, nameOfUnit,
							rule->forever ? ", or -1 for ever" : "");
		return false;
	}
	value->number = (int) ceil(units);
	value->valid = true;
	return true;
}

/*
 * ParseSize fills "value" from the text of a size in bytes, and returns whether
 * it lies within the limits; if not, it sets the check's detail.
 */
bool
ParseSize(const char *text, int least, int most, SettingValue *value)
{
	const char *hint = NULL;

	memset(value, 0, sizeof(SettingValue));
	value->valid = parse_int(text, &value->number, GUC_UNIT_BYTE, &hint) &&
				   value->number >= least && value->number <= most;
	if (!value->valid)
	{
		GUC_check_errdetail("It must be a size from %d to %d bytes.", least, most);
		if (hint != NULL)
			GUC_check_errhint("%s", hint);
	}
	return value->valid;
}
