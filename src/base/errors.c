/*-------------------------------------------------------------------------
 *
 * base/errors.c
 *	  The errors that several files throw, one function each.
 *
 * Every error has a hint that says what to do; one about an operation has a detail that
 * names its scope and key.  No function here locks or reads a table, and none but those for
 * the log returns.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/errors.h"

/*
 * DetailName adds the detail that names scope and key to the error being built.
 */
int
DetailName(const KeyName *name)
{
	return errdetail("Scope \"%s\", key \"%s\".", text_to_cstring(name->scope),
					 text_to_cstring(name->key));
}

/*
 * ErrorNameMissing reports a name that is NULL or empty; "what" is such as "key".
 */
void
ErrorNameMissing(const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("idempotency %s is missing", what),
			 errdetail("It is NULL or empty."),
			 errhint(strcmp(what, "key") == 0 || strcmp(what, "step") == 0
						 ? "Pass 1 to %d characters, the same for every retry of one operation."
						 : "Pass 1 to %d characters.",
					 KEYNAME_MAX_CHARS)));
}

void
ErrorNameTooLong(const char *what, int chars)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("idempotency %s is too long", what),
			 errdetail("It has %d characters; at most %d are allowed.", chars, KEYNAME_MAX_CHARS),
			 errhint("Derive a shorter one with idempotency.natural_key().")));
}

/*
 * ErrorInProgress reports that another transaction holds the key, or, if "until" is not 0,
 * that another owner's lease runs until then.  The server's log also has "logged", unless it is
 * NULL.
 */
void
ErrorInProgress(const KeyName *name, TimestampTz until, const char *logged)
{
	long ms = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);

	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_IN_PROGRESS),
			 errmsg("an operation with this idempotency key is in progress"), DetailName(name),
			 logged == NULL
				 ? 0
				 : errdetail_log("Scope \"%s\", key \"%s\". %s", text_to_cstring(name->scope),
								 text_to_cstring(name->key), logged),
			 until == 0 ? errhint("Retry later with the same key.")
						: errhint("Retry later with the same key. Unless it is renewed, the lease "
								  "of its owner ends in %ld s.",
								  (ms + 999) / 1000)));
}

void
ErrorClaimedHere(const KeyName *name)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_IDEMPOTENCY_IN_PROGRESS),
		 errmsg("this transaction has claimed this idempotency key already"), DetailName(name),
		 errhint(
			 "Complete, fail or release the claim first; a nested operation needs its own key, which idempotency.derive_key() returns.")));
}

/*
 * DetailToken adds the detail that names the token, and the operation unless it is NULL.
 */
int
DetailToken(const KeyName *name, int64 token)
{
	if (name == NULL)
		return errdetail("Token %lld.", (long long) token);
	return errdetail("Scope \"%s\", key \"%s\", token %lld.", text_to_cstring(name->scope),
					 text_to_cstring(name->key), (long long) token);
}

/*
 * ErrorConcurrentChange reports that another transaction changed the row of the key,
 * and this one must not overwrite, or cannot see, the change.
 */
void
ErrorConcurrentChange(const KeyName *name)
{
	ereport(ERROR, (errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
					errmsg("could not serialize access due to a concurrent idempotency key"),
					DetailName(name), errhint("Retry the transaction with the same key.")));
}

void
ErrorNotInstalled(void)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("extension \"idempotency\" is not installed in this database"),
					errhint("Use CREATE EXTENSION idempotency.")));
}

/*
 * ErrorStoreAltered reports a table whose definition is not the extension's: writes that
 * bypass the executor would be unsafe.
 */
void
ErrorStoreAltered(const char *table, const char *why, const char *hint)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("table \"idempotency.%s\" has been altered", table),
					errdetail("%s", why), errhint("%s", hint)));
}

void
ErrorBadArgument(const char *message, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("%s", message), errhint("%s", hint)));
}

/*
 * ErrorRowType reports a row type of another version, or an altered one.
 */
void
ErrorRowType(const char *type)
{
	ereport(ERROR, (errcode(ERRCODE_DATATYPE_MISMATCH),
					errmsg("type \"idempotency.%s\" does not match the library", type),
					errhint("Use ALTER EXTENSION idempotency UPDATE, or undo the ALTER TYPE.")));
}

/* ----------------------------------------------------------------
 * The log
 * ----------------------------------------------------------------
 */

/* How much of an error's text a line of the log has, in bytes. */
#define LOG_BYTES 1024

/*
 * LogCall logs, in one line, a call by which an administrator or an owner deletes or changes
 * what others rely on.
 */
void
LogCall(const char *function, const char *what)
{
	ereport(LOG, (errmsg("idempotency.%s() by role \"%s\": %s", function,
						 GetUserNameFromId(GetUserId(), true), what),
				  errhidestmt(true), errhidecontext(true)));
}

/*
 * ClipForLog returns the beginning of an error's text, in the current memory context.
 */
char *
ClipForLog(const char *message)
{
	int bytes = (int) strlen(message);

	if (bytes <= LOG_BYTES)
		return pstrdup(message);
	return psprintf("%.*s ...", pg_mbcliplen(message, bytes, LOG_BYTES), message);
}
