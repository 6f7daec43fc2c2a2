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

#include "utils/guc.h"
#include "utils/guc_tables.h"
#include "utils/memutils.h"
#include "utils/varlena.h"

#include "compat.h"
#include "guc.h"

int DefaultRetention = 86400;
int DefaultWait = 5000;
int MaxResponseSize = 1024 * 1024;
char *ScopePrefix = "";
bool ScopePrefixRejected = false;
int RelayWorkers = 2;
int HandlerTimeout = 60000;
int OutboxRetention = 86400;
int ReaperNaptime = 10000;
char *ReaperDatabases = "";

/* The parsed idempotency.final_errors: a count, then that many SQLSTATEs. */
static char *finalErrorsText = NULL;
static int *finalErrors = NULL;

/*
 * Classes of SQLSTATE that tell of the server's or the network's state, never
 * of the request: remembering one would make a transient failure final.
 */
static const char *const transientClasses[] = {"00", "08", "25", "40", "53", "55", "57",
											   "58", "72", "F0", "HV", "IK", "XX", NULL};

/*
 * CheckRetention refuses 0: an outcome forgotten at once protects nobody.
 */
static bool
CheckRetention(int *newval, void **extra, GucSource source)
{
	if (*newval != 0)
		return true;
	GUC_check_errdetail("An outcome must be remembered for at least a second; -1 means for ever.");
	return false;
}

/*
 * CheckPrefix accepts an empty prefix, or one with a visible end, so that the
 * prefix "tenant1" cannot open the scopes of "tenant10".
 */
static bool
CheckPrefix(char **newval, void **extra, GucSource source)
{
	size_t bytes = *newval ? strlen(*newval) : 0;

	if (bytes == 0 || (*newval)[bytes - 1] == '/' || (*newval)[bytes - 1] == ':')
		return true;
	GUC_check_errdetail("A scope prefix must end in \"/\" or \":\".");
	return false;
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
 * CheckFinalErrors parses a comma-separated list of SQLSTATEs into "extra":
 * their count, and then they.  An empty list is no error final.
 */
static bool
CheckFinalErrors(char **newval, void **extra, GucSource source)
{
	char *list = pstrdup(*newval);
	char *rest = list;
	int *parsed = guc_malloc(LOG, (strlen(list) + 2) * sizeof(int));
	bool valid = true;
	char *token;

	if (parsed == NULL)
		return false;

	parsed[0] = 0;
	if (list[strspn(list, " ")] == '\0')
		rest = NULL;
	while (valid && (token = strsep(&rest, ",")) != NULL)
	{
		int sqlstate = ParseSqlState(TrimSpaces(token));

		parsed[++parsed[0]] = sqlstate;
		valid = sqlstate != 0;
	}
	pfree(list);

	if (valid)
		*extra = parsed;
	else
		guc_free(parsed);
	return valid;
}

static void
AssignFinalErrors(const char *newval, void *extra)
{
	finalErrors = (int *) extra;
}

/*
 * IsFinalError tells whether run() remembers an error with this SQLSTATE as
 * the operation's final outcome.
 */
bool
IsFinalError(int sqlstate)
{
	for (int i = 1; i <= finalErrors[0]; i++)
	{
		if (finalErrors[i] == sqlstate)
			return true;
	}
	return false;
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
 * DefineSettings registers every setting; called once, from _PG_init().
 */
void
DefineSettings(void)
{
	/* did somebody set it before the server knew who may? */
	struct config_generic *given = FindSetting(PREFIX_SETTING);
	bool prefixGiven = given != NULL && given->source != PGC_S_DEFAULT;

	DefineCustomIntVariable("idempotency.retention",
							"How long a stored outcome is remembered; -1 means for ever.", NULL,
							&DefaultRetention, 86400, -1, INT_MAX, PGC_USERSET, GUC_UNIT_S,
							CheckRetention, NULL, NULL);

	DefineCustomIntVariable(
		"idempotency.wait", "How long a claim waits for the owner of its key; 0 means not at all.",
		NULL, &DefaultWait, 5000, 0, INT_MAX, PGC_USERSET, GUC_UNIT_MS, NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.max_response_size",
							"The largest response, with its headers, that is stored.", NULL,
							&MaxResponseSize, 1024 * 1024, 1024, MaxAllocSize / 2, PGC_USERSET,
							GUC_UNIT_BYTE, NULL, NULL, NULL);

	DefineCustomStringVariable(PREFIX_SETTING, "What every scope must begin with.",
							   "Set by a superuser, per login role. It ends in \"/\" or \":\".",
							   &ScopePrefix, "", PGC_SUSET, 0, CheckPrefix, NULL, NULL);
	ScopePrefixRejected = prefixGiven && FindSetting(PREFIX_SETTING)->source == PGC_S_DEFAULT;

	DefineCustomStringVariable("idempotency.final_errors",
							   "SQLSTATEs that idempotency.run() remembers as final failures.",
							   "A comma-separated list.", &finalErrorsText, "IKFIN", PGC_USERSET, 0,
							   CheckFinalErrors, AssignFinalErrors, NULL);

	DefineCustomIntVariable("idempotency.outbox_retention",
							"How long an event is kept that every subscription has passed.",
							"0 means that it goes at once, -1 that it stays for ever.",
							&OutboxRetention, 86400, -1, INT_MAX, PGC_SUSET, GUC_UNIT_S, NULL, NULL,
							NULL);

	DefineCustomIntVariable("idempotency.reaper_naptime",
							"How often expired keys are removed; 0 means never.",
							"It takes a library that is preloaded.", &ReaperNaptime, 10000, 0,
							INT_MAX, PGC_SIGHUP, GUC_UNIT_MS, CheckNaptime, NULL, NULL);

	DefineCustomIntVariable("idempotency.relay_workers",
							"For how many subscriptions handlers are called at once; 0 means none.",
							"It takes a library that is preloaded.", &RelayWorkers, 2, 0, 1024,
							PGC_SIGHUP, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.handler_timeout",
							"How long a subscription's handler may take for an event; 0 means for "
							"ever.",
							"Set by a superuser, per role or database.", &HandlerTimeout, 60000, 0,
							INT_MAX, PGC_SUSET, GUC_UNIT_MS, NULL, NULL, NULL);

	DefineCustomStringVariable("idempotency.databases", "The databases that workers are sent to.",
							   "A comma-separated list; empty means all.", &ReaperDatabases, "",
							   PGC_SIGHUP, GUC_LIST_INPUT, CheckDatabases, NULL, NULL);

	MarkGUCPrefixReserved("idempotency");
}
