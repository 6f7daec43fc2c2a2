/*-------------------------------------------------------------------------
 *
 * settings/setting.c
 *	  Settings that clients, roles and databases carry, and their invalid values.
 *
 * A SET with an invalid value fails.  A value that was stored while the library was
 * not loaded (ALTER DATABASE, ALTER ROLE, PGOPTIONS, postgresql.conf, SET) cannot
 * fail: the server warns, and continues with the default, which can be the opposite
 * of what was asked for.  So in these cases an invalid value is accepted and marked,
 * and RequireSetting() throws where the setting is needed.
 *
 * Check hooks can run without a transaction: only the functions that read a value throw.
 *
 * A value that is set for a session, a function or a role precedes what configure() stores
 * (settings/configured.c), which precedes that of the database and of the server.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>
#include <math.h>

#include "access/parallel.h"
#include "utils/datetime.h"
#include "utils/guc_tables.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "settings/configured.h"
#include "settings/setting.h"

/* The longest month, so that nothing ends before the interval does. */
#define DAYS_OF_A_MONTH 31

/* A setting is being defined, and gets the value that was set before. */
static bool defining = false;

pg_noreturn static void
ErrorSettingRefused(const Setting *setting)
{
	if (setting->state == SETTING_DENIED)
		ereport(
			ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied to set parameter \"%s\"", setting->name),
			 errdetail(
				 "This session set it before the library was loaded, so that the value set by a superuser is unknown."),
			 errhint("Connect without setting it. A superuser sets it per role.")));

	ereport(
		ERROR,
		(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
		 errmsg("invalid value for parameter \"%s\": \"%s\"", setting->name, setting->text),
		 errdetail(
			 "It was stored before the library could check it. Calls that need the setting fail until its value is valid."),
		 errhint("Correct it with ALTER DATABASE, ALTER ROLE, ALTER FUNCTION or in "
				 "postgresql.conf, and connect again, or use SET.")));
}

/*
 * Stored returns what configure() has stored for the scope, if it precedes the setting's own
 * value, or NULL.
 */
static const ConfiguredSetting *
Stored(const Setting *setting, const text *scope)
{
	return setting->value.specific ? NULL : ConfiguredFind(setting, scope);
}

/*
 * RequireSetting throws 22023 or 42501 unless the value that applies to the scope can be used.
 */
void
RequireSetting(const Setting *setting, const text *scope)
{
	if (setting->state != SETTING_VALID && Stored(setting, scope) == NULL)
		ErrorSettingRefused(setting);
}

/*
 * SettingRetention returns the value of a duration.  Throws what RequireSetting() throws.
 */
Retention
SettingRetention(const Setting *setting, const text *scope)
{
	const ConfiguredSetting *stored = Stored(setting, scope);

	if (stored != NULL)
		return stored->value.duration;
	RequireSetting(setting, scope);
	return setting->value.duration;
}

/*
 * SettingNumber returns the value of a duration, in its unit, or of a size; the fallback while
 * it cannot be used.
 */
int
SettingNumber(const Setting *setting, const text *scope)
{
	const ConfiguredSetting *stored = Stored(setting, scope);

	if (stored != NULL)
		return stored->value.number;
	return setting->state == SETTING_VALID ? setting->value.number : setting->fallback;
}

/*
 * SettingText returns the value as it was set, also one that cannot be used.
 */
const char *
SettingText(const Setting *setting, const text *scope)
{
	const ConfiguredSetting *stored = Stored(setting, scope);

	return stored != NULL ? stored->text : setting->text;
}

/*
 * AcceptInvalid tells whether an invalid value must be accepted, because the server
 * would use the default instead, and warns of it.  A parallel worker accepts what
 * its leader has accepted.
 */
static bool
AcceptInvalid(const Setting *setting, const char *text, GucSource source)
{
	bool stored = source >= PGC_S_GLOBAL && source <= PGC_S_DATABASE_USER;
	bool warned = setting->state == SETTING_INVALID && strcmp(setting->text, text) == 0;

	if (!defining && !stored && !InitializingParallelWorker)
		return false;
	ereport(warned || InitializingParallelWorker ? DEBUG1 : WARNING,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid value for parameter \"%s\": \"%s\"", setting->name, text),
			 GUC_check_errdetail_string ? errdetail_internal("%s", GUC_check_errdetail_string) : 0,
			 GUC_check_errhint_string ? errhint("%s", GUC_check_errhint_string) : 0));
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
 * ParseDuration fills "value" from the text of a duration, and returns whether the
 * setting allows it; if not, it sets the check's detail.
 */
bool
ParseDuration(const Setting *setting, const char *text, SettingValue *value)
{
	bool seconds = setting->unit == GUC_UNIT_S;
	const char *nameOfUnit = seconds ? "seconds" : "milliseconds";
	int64 unit = seconds ? USECS_PER_SEC : 1000;
	Interval *length = &value->duration.length;
	double units;
	int number;

	if (parse_int(text, &number, setting->unit, NULL))
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
	value->duration.forever = setting->forever && units == -1;
	if (!value->duration.forever && (units < setting->least || units > setting->most))
	{
		GUC_check_errdetail("It must be from %d to %d %s%s.", setting->least, setting->most,
							nameOfUnit, setting->forever ? ", or -1 (forever)" : "");
		return false;
	}
	value->number = (int) ceil(units);
	return true;
}

/*
 * ParseSize fills "value" from the text of a size in bytes, and returns whether the
 * setting allows it; if not, it sets the check's detail.
 */
bool
ParseSize(const Setting *setting, const char *text, SettingValue *value)
{
	const char *hint = NULL;

	if (parse_int(text, &value->number, GUC_UNIT_BYTE, &hint) && value->number >= setting->least &&
		value->number <= setting->most)
		return true;
	GUC_check_errdetail("It must be a size from %d to %d bytes.", setting->least, setting->most);
	if (hint != NULL)
		GUC_check_errhint("%s", hint);
	return false;
}

/*
 * SettingCheck is the check hook: it stores the value in "extra" for the assign hook, and
 * returns whether it is accepted.
 */
bool
SettingCheck(const Setting *setting, const char *text, void **extra, GucSource source)
{
	SettingValue value = {.specific = source > PGC_S_DATABASE};
	SettingValue *copy;

	value.valid = setting->parse(setting, text, &value);
	if (!value.valid && !AcceptInvalid(setting, text, source))
		return false;
	copy = guc_malloc(LOG, sizeof(SettingValue));
	if (copy == NULL)
		return false;
	*copy = value;
	*extra = copy;
	return true;
}

void
SettingAssign(Setting *setting, const void *extra)
{
	setting->value = *(const SettingValue *) extra;
	setting->state = setting->value.valid ? SETTING_VALID : SETTING_INVALID;
}

/*
 * FindSetting returns the server's own record of a setting, or NULL.
 */
static struct config_generic *
FindSetting(const char *name)
{
#ifdef SERVER_FINDS_SETTINGS
	return find_option(name, false, true, 0);
#else
	struct config_generic **settings = get_guc_variables();

	for (int i = 0; i < GetNumConfigOptions(); i++)
	{
		if (pg_strcasecmp(settings[i]->name, name) == 0)
			return settings[i];
	}
	return NULL;
#endif
}

/*
 * SettingDefine defines a setting.  If the session has set one of PGC_SUSET without
 * the right to, the server drops that value, and with it the superuser's value,
 * which is then unknown: the setting is denied until it is assigned again.
 */
void
SettingDefine(Setting *setting, const char *description, const char *more, const char *boot,
			  GucContext context, GucStringCheckHook check, GucStringAssignHook assign)
{
	const struct config_generic *found = FindSetting(setting->name);
	bool wasSet = found != NULL && found->source != PGC_S_DEFAULT;
	bool wasSetAtLogin = found != NULL && found->reset_source != PGC_S_DEFAULT;

	defining = true;
	DefineCustomStringVariable(setting->name, description, more, &setting->text, boot, context, 0,
							   check, assign, NULL);
	defining = false;
	found = FindSetting(setting->name);
	/* a parallel worker will drop the value of the login for that of its leader */
	setting->hidden = wasSetAtLogin && (found->reset_source == PGC_S_DEFAULT || IsParallelWorker());
	if (!wasSet || found->source != PGC_S_DEFAULT)
		return;
	setting->state = SETTING_DENIED;
	setting->value.specific = true;
}
