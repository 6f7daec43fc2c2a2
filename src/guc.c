/*-------------------------------------------------------------------------
 *
 * guc.c
 *	  The settings idempotency.*, their ranges and their check hooks.
 *
 * Check hooks may run without a transaction, so they look at nothing but the
 * value, and report through GUC_check_errdetail().
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"
#include "utils/memutils.h"
#include "utils/varlena.h"

#include "compat.h"
#include "guc.h"
#include "setting.h"

#define WAIT_MS 5000
#define HANDLER_TIMEOUT_MS 60000

Setting RetentionSetting = {.name = "idempotency.retention"};
static Setting WaitSetting = {.name = "idempotency.wait"};
Setting ResponseSizeSetting = {.name = "idempotency.max_response_size"};
Setting PrefixSetting = {.name = PREFIX_SETTING};
Setting FinalErrorsSetting = {.name = "idempotency.final_errors"};
static Setting OutboxRetentionSetting = {.name = "idempotency.outbox_retention"};
static Setting HandlerTimeoutSetting = {.name = "idempotency.handler_timeout"};

Retention DefaultRetention = {.length = {.time = USECS_PER_DAY}};
int DefaultWait = WAIT_MS;
int MaxResponseSize = 1024 * 1024;
int RelayWorkers = 2;
int RelaySubscriptions = 1024;
int HandlerTimeout = HANDLER_TIMEOUT_MS;
int OutboxRetention = SECS_PER_DAY;
int ReaperNaptime = 10000;
char *ReaperDatabases = "";

/* The parsed idempotency.final_errors. */
typedef struct FinalErrors
{
	bool valid;
	int count;
	int sqlstates[FLEXIBLE_ARRAY_MEMBER];
} FinalErrors;

static const FinalErrors *finalErrors = NULL;

/*
 * Classes of SQLSTATE that tell of the server's or the network's state, never
 * of the request: remembering one would make a transient failure final.
 */
static const char *const transientClasses[] = {"00", "08", "25", "40", "53", "55", "57",
											   "58", "72", "F0", "HV", "IK", "XX", NULL};

/* ----------------------------------------------------------------
 * Durations and sizes.  What an invalid value leaves is the least harmful: where
 * that is an error, RequireSetting() throws it.
 * ----------------------------------------------------------------
 */

/*
 * AcceptDuration does SettingAccept() with a duration that follows a rule.
 */
static bool
AcceptDuration(Setting *setting, const DurationRule *rule, char *newval, void **extra,
			   GucSource source)
{
	SettingValue value;

	ParseDuration(newval, rule, &value);
	return SettingAccept(setting, newval, extra, source, &value);
}

/*
 * Assigned returns the value that SettingAccept() has accepted, and notes whether it is
 * valid.
 */
static const SettingValue *
Assigned(Setting *setting, const void *extra)
{
	const SettingValue *value = extra;

	setting->state = value->valid ? SETTING_VALID : SETTING_INVALID;
	return value;
}

/*
 * CheckRetention refuses less than a second, which would disable deduplication.
 */
static bool
CheckRetention(char **newval, void **extra, GucSource source)
{
	const DurationRule rule = {.unit = GUC_UNIT_S, .nonzero = true, .forever = true};

	return AcceptDuration(&RetentionSetting, &rule, *newval, extra, source);
}

static void
AssignRetention(const char *newval, void *extra)
{
	DefaultRetention = Assigned(&RetentionSetting, extra)->duration;
}

static bool
CheckWait(char **newval, void **extra, GucSource source)
{
	const DurationRule rule = {.unit = GUC_UNIT_MS};

	return AcceptDuration(&WaitSetting, &rule, *newval, extra, source);
}

/*
 * AssignWait keeps the default for an invalid value: every wait is safe.
 */
static void
AssignWait(const char *newval, void *extra)
{
	const SettingValue *value = Assigned(&WaitSetting, extra);

	DefaultWait = value->valid ? value->number : WAIT_MS;
}

static bool
CheckResponseSize(char **newval, void **extra, GucSource source)
{
	SettingValue value;

	ParseSize(*newval, 1024, MaxAllocSize / 2, &value);
	return SettingAccept(&ResponseSizeSetting, *newval, extra, source, &value);
}

/*
 * AssignResponseSize makes every document too large for an invalid value;
 * ErrorTooLarge() says why.
 */
static void
AssignResponseSize(const char *newval, void *extra)
{
	const SettingValue *value = Assigned(&ResponseSizeSetting, extra);

	MaxResponseSize = value->valid ? value->number : 0;
}

static bool
CheckOutboxRetention(char **newval, void **extra, GucSource source)
{
	const DurationRule rule = {.unit = GUC_UNIT_S, .forever = true};

	return AcceptDuration(&OutboxRetentionSetting, &rule, *newval, extra, source);
}

/*
 * AssignOutboxRetention keeps all events for an invalid value.
 */
static void
AssignOutboxRetention(const char *newval, void *extra)
{
	const SettingValue *value = Assigned(&OutboxRetentionSetting, extra);

	OutboxRetention = value->valid ? value->number : -1;
}

static bool
CheckHandlerTimeout(char **newval, void **extra, GucSource source)
{
	const DurationRule rule = {.unit = GUC_UNIT_MS};

	return AcceptDuration(&HandlerTimeoutSetting, &rule, *newval, extra, source);
}

/*
 * AssignHandlerTimeout keeps the default for an invalid value: an error would
 * count as a failed attempt of every event.
 */
static void
AssignHandlerTimeout(const char *newval, void *extra)
{
	const SettingValue *value = Assigned(&HandlerTimeoutSetting, extra);

	HandlerTimeout = value->valid ? value->number : HANDLER_TIMEOUT_MS;
}

/* ----------------------------------------------------------------
 * Texts
 * ----------------------------------------------------------------
 */

/*
 * CheckPrefix accepts an empty prefix, or one with a visible end, so that the
 * prefix "tenant1" cannot open the scopes of "tenant10".
 */
static bool
CheckPrefix(char **newval, void **extra, GucSource source)
{
	size_t bytes = strlen(*newval);
	SettingValue value = {.valid = bytes == 0 || (*newval)[bytes - 1] == '/' ||
								   (*newval)[bytes - 1] == ':'};

	if (!value.valid)
		GUC_check_errdetail("A scope prefix must end in \"/\" or \":\".");
	return SettingAccept(&PrefixSetting, *newval, extra, source, &value);
}

static void
AssignPrefix(const char *newval, void *extra)
{
	(void) Assigned(&PrefixSetting, extra);
}

/*
 * CheckNaptime accepts 0, and refuses naps so short that the tours would be a
 * load.
 */
static bool
CheckNaptime(int *newval, void **extra, GucSource source)
{
	if (*newval == 0 || *newval >= 100)
		return true;
	GUC_check_errdetail("A nap takes at least 100 ms; 0 means that nothing is reaped.");
	return false;
}

/*
 * CheckDatabases accepts a list of names, which need not be those of databases.
 */
static bool
CheckDatabases(char **newval, void **extra, GucSource source)
{
	char *text = pstrdup(*newval);
	List *names;
	bool isList = SplitIdentifierString(text, ',', &names);

	if (!isList)
		GUC_check_errdetail("List syntax is invalid.");
	list_free(names);
	pfree(text);
	return isList;
}

/*
 * TrimSpaces returns "s" without the spaces around it; it cuts off the ones at
 * the end in place.
 */
static char *
TrimSpaces(char *s)
{
	char *end = s + strlen(s);

	while (end > s && end[-1] == ' ')
		*--end = '\0';
	return s + strspn(s, " ");
}

/*
 * ParseSqlState turns five characters into a SQLSTATE, or returns 0 and says
 * why in the check's detail.
 */
static int
ParseSqlState(const char *token)
{
	if (strlen(token) != 5 || strspn(token, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5)
	{
		GUC_check_errdetail("\"%s\" is not an SQLSTATE of five digits and capital letters.", token);
		return 0;
	}
	for (int i = 0; transientClasses[i] != NULL; i++)
	{
		/* IKFIN is the one code of ours that tells of the request. */
		if (strncmp(token, transientClasses[i], 2) == 0 && strcmp(token, "IKFIN") != 0)
		{
			GUC_check_errdetail(
				"\"%s\" tells of a transient failure, which must not be remembered.", token);
			return 0;
		}
	}
	return MAKE_SQLSTATE(token[0], token[1], token[2], token[3], token[4]);
}

/*
 * ParseFinalErrors fills "parsed", which has room for all, from a comma-separated
 * list of SQLSTATEs.  An empty list is no error final.
 */
static void
ParseFinalErrors(const char *text, FinalErrors *parsed)
{
	char *list = pstrdup(text);
	char *rest = list;
	char *token;

	parsed->valid = true;
	parsed->count = 0;
	if (list[strspn(list, " ")] == '\0')
		rest = NULL;
	while (parsed->valid && (token = strsep(&rest, ",")) != NULL)
	{
		int sqlstate = ParseSqlState(TrimSpaces(token));

		parsed->sqlstates[parsed->count++] = sqlstate;
		parsed->valid = sqlstate != 0;
	}
	pfree(list);
}

static bool
CheckFinalErrors(char **newval, void **extra, GucSource source)
{
	Size places = strlen(*newval) / 2 + 1; /* a comma after every SQLSTATE */
	FinalErrors *parsed = guc_malloc(LOG, offsetof(FinalErrors, sqlstates) + places * sizeof(int));

	if (parsed == NULL)
		return false;
	ParseFinalErrors(*newval, parsed);
	if (!parsed->valid && !SettingMayStay(&FinalErrorsSetting, *newval, source))
	{
		guc_free(parsed);
		return false;
	}
	*extra = parsed;
	return true;
}

static void
AssignFinalErrors(const char *newval, void *extra)
{
	finalErrors = extra;
	FinalErrorsSetting.state = finalErrors->valid ? SETTING_VALID : SETTING_INVALID;
}

/*
 * IsFinalError tells whether run() remembers an error with this SQLSTATE as
 * the operation's final outcome.
 */
bool
IsFinalError(int sqlstate)
{
	for (int i = 0; i < finalErrors->count; i++)
	{
		if (finalErrors->sqlstates[i] == sqlstate)
			return true;
	}
	return false;
}

/* ----------------------------------------------------------------
 * Definitions
 * ----------------------------------------------------------------
 */

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
 * DefineText defines a setting whose value the library parses.  Of one that only
 * superusers set, the server drops a value that the session brought without the
 * right to, and with it the value that it had hidden: then nothing tells what the
 * superuser has set, and the setting is denied until it is assigned again.
 */
static void
DefineText(Setting *setting, const char *description, const char *more, const char *boot,
		   GucContext context, GucStringCheckHook check, GucStringAssignHook assign)
{
	struct config_generic *given = FindSetting(setting->name);
	bool wasGiven = given != NULL && given->source != PGC_S_DEFAULT;

	DefineCustomStringVariable(setting->name, description, more, &setting->text, boot, context, 0,
							   check, assign, NULL);
	if (wasGiven && FindSetting(setting->name)->source == PGC_S_DEFAULT)
		setting->state = SETTING_DENIED;
}

/*
 * DefineClientSettings registers what roles, databases and functions carry.
 */
static void
DefineClientSettings(void)
{
	DefineText(&RetentionSetting, "How long a stored outcome is remembered; -1 means for ever.",
			   "An interval, or a number of seconds.", "1d", PGC_USERSET, CheckRetention,
			   AssignRetention);
	DefineText(&WaitSetting, "How long a claim waits for the owner of its key; 0 means not at all.",
			   "An interval, or a number of milliseconds.", "5s", PGC_USERSET, CheckWait,
			   AssignWait);
	DefineText(&ResponseSizeSetting, "The largest response, with its headers, that is stored.",
			   "In bytes.", "1MB", PGC_USERSET, CheckResponseSize, AssignResponseSize);
	DefineText(&PrefixSetting, "What every scope must begin with.",
			   "Set by a superuser, per login role. It ends in \"/\" or \":\".", "", PGC_SUSET,
			   CheckPrefix, AssignPrefix);
	DefineText(&FinalErrorsSetting, "SQLSTATEs that idempotency.run() remembers as final failures.",
			   "A comma-separated list.", "IKFIN", PGC_USERSET, CheckFinalErrors,
			   AssignFinalErrors);
	DefineText(&OutboxRetentionSetting,
			   "How long an event is kept that every subscription has passed.",
			   "0 means that it goes at once, -1 that it stays for ever.", "1d", PGC_SUSET,
			   CheckOutboxRetention, AssignOutboxRetention);
	DefineText(&HandlerTimeoutSetting,
			   "How long a subscription's handler may take for an event; 0 means for ever.",
			   "Set by a superuser, per role or database.", "1min", PGC_SUSET, CheckHandlerTimeout,
			   AssignHandlerTimeout);
	if (OutboxRetentionSetting.state == SETTING_DENIED)
		OutboxRetention = -1;
}

/*
 * DefineSettings registers every setting; called once, from _PG_init().
 */
void
DefineSettings(void)
{
	SettingsLoading(true);
	DefineClientSettings();
	SettingsLoading(false);

	DefineCustomIntVariable("idempotency.reaper_naptime",
							"How often expired keys are removed; 0 means never.",
							"It takes a library that is preloaded.", &ReaperNaptime, 10000, 0,
							INT_MAX, PGC_SIGHUP, GUC_UNIT_MS, CheckNaptime, NULL, NULL);

	DefineCustomIntVariable("idempotency.relay_workers",
							"For how many subscriptions handlers are called at once; 0 means none.",
							"It takes a library that is preloaded.", &RelayWorkers, 2, 0, 1024,
							PGC_SIGHUP, 0, NULL, NULL, NULL);

	if (process_shared_preload_libraries_in_progress)
		DefineCustomIntVariable("idempotency.relay_subscriptions",
								"How many subscriptions with a handler the server has room for.",
								"It takes a library that is preloaded.", &RelaySubscriptions, 1024,
								16, 8192, PGC_POSTMASTER, 0, NULL, NULL, NULL);

	DefineCustomStringVariable("idempotency.databases", "The databases that workers are sent to.",
							   "A comma-separated list; empty means all.", &ReaperDatabases, "",
							   PGC_SIGHUP, GUC_LIST_INPUT, CheckDatabases, NULL, NULL);

	MarkGUCPrefixReserved("idempotency");
}
