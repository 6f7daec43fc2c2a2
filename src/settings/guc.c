/*-------------------------------------------------------------------------
 *
 * settings/guc.c
 *	  The settings idempotency.*: limits, hooks and definitions.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <ctype.h>
#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/varlena.h"

#include "base/compat.h"
#include "settings/guc.h"
#include "settings/setting.h"

#define WAIT_MS 5000
#define HANDLER_TIMEOUT_MS 60000
#define DOCUMENTATION_MAX_BYTES 2000

int RelayWorkers = 2;
int ReaperNaptime = 10000;
char *ReaperDatabases = "";

static bool ParsePrefix(const Setting *setting, const char *text, SettingValue *value);
static bool ParseFinalErrors(const Setting *setting, const char *text, SettingValue *value);
static bool ParseDocumentation(const Setting *setting, const char *text, SettingValue *value);

/*
 * The fallback of an invalid value does the least harm: every wait is safe, no
 * document is stored (ErrorTooLarge() says why) or published, all events are kept, and a handler
 * is called, since an error would count as a failed attempt of every event.
 */
Setting RetentionSetting = {
	.name = "idempotency.retention",
	.parse = ParseDuration,
	.unit = GUC_UNIT_S,
	.least = 1, /* 0 would disable deduplication */
	.most = INT_MAX,
	.forever = true,
};
Setting WaitSetting = {
	.name = "idempotency.wait",
	.parse = ParseDuration,
	.unit = GUC_UNIT_MS,
	.most = LONGEST_WAIT_DAYS * SECS_PER_DAY * 1000,
	.fallback = WAIT_MS,
};
Setting ResponseSizeSetting = {
	.name = "idempotency.max_response_size",
	.parse = ParseSize,
	.unit = GUC_UNIT_BYTE,
	.least = 1024,
	.most = MaxAllocSize / 2,
	.fallback = 0,
};
Setting PayloadSizeSetting = {
	.name = "idempotency.max_payload_size",
	.parse = ParseSize,
	.unit = GUC_UNIT_BYTE,
	.least = 1024,
	.most = MaxAllocSize / 2,
	.fallback = 0,
};
Setting OutboxRetentionSetting = {
	.name = "idempotency.outbox_retention",
	.parse = ParseDuration,
	.unit = GUC_UNIT_S,
	.most = INT_MAX,
	.forever = true,
	.fallback = -1,
};
Setting HandlerTimeoutSetting = {
	.name = "idempotency.handler_timeout",
	.parse = ParseDuration,
	.unit = GUC_UNIT_MS,
	.most = INT_MAX,
	.fallback = HANDLER_TIMEOUT_MS,
};
Setting PrefixSetting = {.name = "idempotency.scope_prefix", .parse = ParsePrefix};
Setting FinalErrorsSetting = {.name = "idempotency.final_errors", .parse = ParseFinalErrors};
static Setting DocumentationSetting = {.name = "idempotency.documentation",
									   .parse = ParseDocumentation};

/* What configure() can store; setting_name() in delivery/settings.sql has the same names. */
static Setting *const configurable[] = {
	&RetentionSetting,	 &WaitSetting,			&ResponseSizeSetting,	 &PayloadSizeSetting,
	&FinalErrorsSetting, &DocumentationSetting, &OutboxRetentionSetting, NULL};

/*
 * Classes of SQLSTATE that depend on the server or the network and not on the request.
 * If such an error were stored, a transient failure would be final.
 */
static const char *const transientClasses[] = {"00", "08", "25", "40", "53", "55", "57",
											   "58", "72", "F0", "HV", "IK", "XX", NULL};

/* ----------------------------------------------------------------
 * Hooks
 * ----------------------------------------------------------------
 */

#define HOOKS(name)                                                                                \
	static bool Check##name(char **newval, void **extra, GucSource source)                         \
	{                                                                                              \
		return SettingCheck(&name##Setting, *newval, extra, source);                               \
	}                                                                                              \
	static void Assign##name(const char *newval, void *extra)                                      \
	{                                                                                              \
		SettingAssign(&name##Setting, extra);                                                      \
	}

HOOKS(Retention)
HOOKS(Wait)
HOOKS(ResponseSize)
HOOKS(PayloadSize)
HOOKS(OutboxRetention)
HOOKS(HandlerTimeout)
HOOKS(Prefix)
HOOKS(FinalErrors)
HOOKS(Documentation)

/*
 * ParsePrefix requires a separator at the end of a prefix, so that the prefix "tenant1"
 * cannot permit the scopes of "tenant10".
 */
static bool
ParsePrefix(const Setting *setting, const char *text, SettingValue *value)
{
	size_t bytes = strlen(text);

	if (bytes == 0 || text[bytes - 1] == '/' || text[bytes - 1] == ':')
		return true;
	GUC_check_errdetail("A scope prefix must end in \"/\" or \":\".");
	return false;
}

/*
 * IsUriReference tells whether "s" can be a URI reference (RFC 3986): the characters that
 * one consists of, a scheme in front of the first colon, and at most one fragment.  So a
 * valid value needs no escape between the angle brackets of a Link header, and cannot end
 * the header.
 */
static bool
IsUriReference(const char *s)
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
	static const char schemeCharacters[] =
		"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.";
	static const char characters[] =
		"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
		"-._~:/?#[]@!$&'()*+,;=%";
	size_t beforeColon = strcspn(s, ":/?#");

	if (strlen(s) > DOCUMENTATION_MAX_BYTES || s[strspn(s, characters)] != '\0')
		return false;
	for (const char *at = strchr(s, '%'); at != NULL; at = strchr(at + 1, '%'))
	{
		if (!isxdigit((unsigned char) at[1]) || !isxdigit((unsigned char) at[2]))
			return false;
	}
	if (s[beforeColon] == ':' &&
		(strspn(s, letters) == 0 || strspn(s, schemeCharacters) != beforeColon))
		return false;
	return strchr(s, '#') == strrchr(s, '#');
}

static bool
ParseDocumentation(const Setting *setting, const char *text, SettingValue *value)
{
	if (IsUriReference(text))
		return true;
	GUC_check_errdetail("It must be a URI reference (RFC 3986) of at most %d bytes.",
						DOCUMENTATION_MAX_BYTES);
	return false;
}

/*
 * DocumentationUri returns the URI reference of idempotency.documentation; empty if it is
 * not set, or if its value is invalid, since problem details can do without it.
 */
const char *
DocumentationUri(void)
{
	const char *uri = SettingText(&DocumentationSetting, NULL);

	return IsUriReference(uri) ? uri : "";
}

/*
 * CheckNaptime refuses intervals that are so short that the reaper would be a load.
 */
static bool
CheckNaptime(int *newval, void **extra, GucSource source)
{
	if (*newval == 0 || *newval >= 100)
		return true;
	GUC_check_errdetail("It must be at least 100 ms, or 0 to disable the reaper.");
	return false;
}

/*
 * CheckDatabases accepts a list of names, even of databases that do not exist.
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
 * TrimSpaces returns "s" without the spaces around it; it removes those at the end in
 * place.
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
 * CanBeFinal tells whether "token" is an SQLSTATE that can be final; if not, it sets the
 * check's detail.
 */
static bool
CanBeFinal(const char *token)
{
	if (strlen(token) != 5 || strspn(token, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5)
	{
		GUC_check_errdetail("\"%s\" is not an SQLSTATE of five digits and capital letters.", token);
		return false;
	}
	for (int i = 0; transientClasses[i] != NULL; i++)
	{
		/* IKFIN is the only code of the extension about the request */
		if (strncmp(token, transientClasses[i], 2) == 0 && strcmp(token, "IKFIN") != 0)
		{
			GUC_check_errdetail("\"%s\" is a transient failure, which cannot be final.", token);
			return false;
		}
	}
	return true;
}

/*
 * ParseFinalErrors accepts a comma-separated list of SQLSTATEs.  With an empty list no
 * error is final.
 */
static bool
ParseFinalErrors(const Setting *setting, const char *text, SettingValue *value)
{
	char *list = pstrdup(text);
	char *rest = list[strspn(list, " ")] == '\0' ? NULL : list;
	char *token;
	bool allowed = true;

	while (allowed && (token = strsep(&rest, ",")) != NULL)
		allowed = CanBeFinal(TrimSpaces(token));
	pfree(list);
	return allowed;
}

/*
 * IsFinalError tells whether run() stores an error with this SQLSTATE as the final
 * outcome of the operation.
 */
bool
IsFinalError(int sqlstate)
{
	return strstr(SettingText(&FinalErrorsSetting, NULL), unpack_sql_state(sqlstate)) != NULL;
}

/*
 * ConfigurableSetting returns the setting that configure() calls so, or NULL.
 */
Setting *
ConfigurableSetting(const char *name)
{
	for (int i = 0; configurable[i] != NULL; i++)
	{
		if (strcmp(strchr(configurable[i]->name, '.') + 1, name) == 0)
			return configurable[i];
	}
	return NULL;
}

/* ----------------------------------------------------------------
 * Definitions
 * ----------------------------------------------------------------
 */

/*
 * DefineClientSettings defines the settings that roles, databases and functions carry.
 */
static void
DefineClientSettings(void)
{
	SettingDefine(&RetentionSetting, "How long a stored outcome is retained; -1 means forever.",
				  "An interval, or a number of seconds.", "1d", PGC_USERSET, CheckRetention,
				  AssignRetention);
	SettingDefine(
		&WaitSetting, "How long a claim waits for the owner of its key; 0 disables waiting.",
		"An interval, or a number of milliseconds.", "5s", PGC_USERSET, CheckWait, AssignWait);
	SettingDefine(&ResponseSizeSetting, "The largest response, with its headers, that is stored.",
				  "In bytes.", "1MB", PGC_USERSET, CheckResponseSize, AssignResponseSize);
	SettingDefine(&PayloadSizeSetting, "The largest payload, with its headers, that is published.",
				  "In bytes.", "1MB", PGC_USERSET, CheckPayloadSize, AssignPayloadSize);
	SettingDefine(&PrefixSetting, "The prefix of every scope.",
				  "Set by a superuser, per login role. It ends in \"/\" or \":\".", "", PGC_SUSET,
				  CheckPrefix, AssignPrefix);
	SettingDefine(&FinalErrorsSetting, "SQLSTATEs that idempotency.run() stores as final failures.",
				  "A comma-separated list.", "IKFIN", PGC_USERSET, CheckFinalErrors,
				  AssignFinalErrors);
	SettingDefine(&DocumentationSetting,
				  "A link to the documentation of the API, for problem details.",
				  "A URI reference; empty: no link.", "", PGC_USERSET, CheckDocumentation,
				  AssignDocumentation);
	SettingDefine(&OutboxRetentionSetting,
				  "How long an event is retained after every subscription has passed it.",
				  "0 deletes it at once, -1 never.", "1d", PGC_SUSET, CheckOutboxRetention,
				  AssignOutboxRetention);
	SettingDefine(
		&HandlerTimeoutSetting,
		"How long a subscription's handler can take for an event; 0 disables the timeout.",
		"Set by a superuser, per role or database.", "1min", PGC_SUSET, CheckHandlerTimeout,
		AssignHandlerTimeout);
}

/*
 * DefineSettings defines every setting; called once, from _PG_init().
 */
void
DefineSettings(void)
{
	DefineClientSettings();

	DefineCustomIntVariable("idempotency.reaper_naptime",
							"How often expired keys are deleted; 0 means never.",
							"The library must be preloaded.", &ReaperNaptime, 10000, 0, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_MS, CheckNaptime, NULL, NULL);

	DefineCustomIntVariable(
		"idempotency.relay_workers",
		"The maximum number of workers that call handlers; 0 disables handlers.",
		"The library must be preloaded.", &RelayWorkers, 2, 0, 1024, PGC_SIGHUP, 0, NULL, NULL,
		NULL);

	DefineCustomStringVariable("idempotency.databases", "The databases in which workers run.",
							   "A comma-separated list; empty means all.", &ReaperDatabases, "",
							   PGC_SIGHUP, GUC_LIST_INPUT, CheckDatabases, NULL, NULL);

	MarkGUCPrefixReserved("idempotency");
}
