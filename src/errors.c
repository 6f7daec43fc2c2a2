/*-------------------------------------------------------------------------
 *
 * errors.c
 *	  The errors that users see, one function each.
 *
 * Every error of our own has a hint that says what to do; one that is about an
 * operation, and not about an argument alone, has a detail that names its
 * scope and key.  PostgreSQL's errors pass through us as they are.  None of
 * these functions returns, takes a lock or looks at a table, so that they are
 * safe wherever PostgreSQL allows an error at all.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/timestamp.h"

#include "errors.h"
#include "guc.h"

/*
 * DetailName adds the detail that names the scope and the key to the error
 * being built.
 */
static int
DetailName(const KeyName *name)
{
	return errdetail("Scope \"%s\", key \"%s\".", text_to_cstring(name->scope),
					 text_to_cstring(name->key));
}

/*
 * ErrorNameMissing reports that a scope or key is NULL or empty; "what" is
 * one of those two words.
 */
void
ErrorNameMissing(const char *what)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("idempotency %s is missing", what),
					errdetail("It is NULL or empty."),
					errhint("Pass 1 to %d characters, the same for every retry of one operation.",
							KEYNAME_MAX_CHARS)));
}

/*
 * ErrorNameTooLong reports a scope or key of more characters than are stored.
 */
void
ErrorNameTooLong(const char *what, int chars)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("idempotency %s is too long", what),
			 errdetail("It has %d characters; at most %d are allowed.", chars, KEYNAME_MAX_CHARS),
			 errhint("Derive a short one from the long one with idempotency.natural_key().")));
}

/*
 * ErrorControlCharacter reports a control character in a scope or key.  The
 * text itself is left out: it would garble the log that shows it.
 */
void
ErrorControlCharacter(const char *what, int position)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
					errmsg("idempotency %s contains a control character", what),
					errdetail("It stands at character %d.", position),
					errhint("Refuse such a request: no client sends one on purpose.")));
}

/*
 * ErrorKeyIsArray reports a single key that is the text of an array.
 */
void
ErrorKeyIsArray(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("idempotency key is an array"),
			 errdetail("idempotency.once() stores one key; drivers pass an array as its text."),
			 errhint("Call idempotency.once_many() with the array.")));
}

/*
 * ErrorRequestAndFingerprint reports a claim that brings both.
 */
void
ErrorRequestAndFingerprint(const KeyName *name)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
					errmsg("request and fingerprint are both given"), DetailName(name),
					errhint("Pass the request, or a fingerprint that you computed of it.")));
}

/*
 * ErrorFingerprintLength reports a fingerprint that is no digest.
 */
void
ErrorFingerprintLength(const KeyName *name, int bytes)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("fingerprint has %d bytes", bytes),
			 DetailName(name),
			 errhint("Pass a cryptographic digest of 16 to 64 bytes, as idempotency.fingerprint() "
					 "makes.")));
}

/*
 * ErrorNoKeyParts reports a natural key of nothing.
 */
void
ErrorNoKeyParts(void)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("natural key has no parts"),
					errhint("Pass the values that identify the operation, each as an argument.")));
}

/*
 * ErrorMalformedHeader reports a header field that is no structured string.
 */
void
ErrorMalformedHeader(const char *reason)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
					errmsg("malformed Idempotency-Key header"), errdetail("%s", reason),
					errhint("The value is an RFC 8941 string in double quotes, such as "
							"\"8e03978e-40d5-43dd-bc93-6894a57f9324\".")));
}

/*
 * ErrorClaimRequired reports a write to a guarded table.  "asked" says that
 * the transaction did ask for a key there, but does not own it.
 */
void
ErrorClaimRequired(const char *schema, const char *table, const char *scopePattern, bool asked)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_CLAIM_REQUIRED),
			 errmsg("write to table \"%s.%s\" without a claim", schema, table),
			 asked
				 ? errdetail("The last claim of this transaction in scope \"%s\" was not granted, "
							 "or was released or forgotten.",
							 scopePattern)
				 : errdetail("This transaction has claimed no key in scope \"%s\".", scopePattern),
			 errhint("Call idempotency.claim() first, and write only if it did not replay.")));
}

/*
 * ErrorInProgress reports that another transaction still holds the key.
 */
void
ErrorInProgress(const KeyName *name)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_IN_PROGRESS),
					errmsg("an operation with this idempotency key is in progress"),
					DetailName(name), errhint("Retry later with the same key.")));
}

/*
 * ErrorLeased reports that the key's owner has a lease, which runs.
 */
void
ErrorLeased(const KeyName *name, TimestampTz until)
{
	long ms = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);

	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_IN_PROGRESS),
			 errmsg("an operation with this idempotency key is in progress"), DetailName(name),
			 errhint("Retry later with the same key. Unless it is renewed, the lease of its "
					 "owner ends in %ld s.",
					 (ms + 999) / 1000)));
}

/*
 * ErrorClaimedHere reports that this very transaction holds the key.
 */
void
ErrorClaimedHere(const KeyName *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_IN_PROGRESS),
			 errmsg("this transaction has claimed this idempotency key already"), DetailName(name),
			 errhint("Complete, fail or release the claim first; a nested operation needs a "
					 "key of its own, as idempotency.derive_key() gives.")));
}

/*
 * DetailToken adds the detail that names the token, and the operation where it is known.
 */
static int
DetailToken(const KeyName *name, int64 token)
{
	if (name == NULL)
		return errdetail("Token %lld.", (long long) token);
	return errdetail("Scope \"%s\", key \"%s\", token %lld.", text_to_cstring(name->scope),
					 text_to_cstring(name->key), (long long) token);
}

/*
 * ErrorLeaseLost reports a token that is not, or no longer, that of the key's
 * lease.  The caller dooms the transaction before it calls this.
 */
void
ErrorLeaseLost(const KeyName *name, int64 token)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_CLAIM_LOST),
			 errmsg("the lease on this idempotency key is lost"), DetailToken(name, token),
			 errhint("Another owner took over, or the operation is finished or forgotten. Roll "
					 "back, and begin the retry with idempotency.claim().")));
}

/*
 * ErrorTokenUnproven reports, at commit, that no call with the token has succeeded, or
 * that the one that did was rolled back; "name" is NULL if the call had no valid one.
 */
void
ErrorTokenUnproven(const KeyName *name, int64 token)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_CLAIM_LOST),
			 errmsg("cannot commit without proof that the lease is current"),
			 DetailToken(name, token),
			 errhint("A call with this token failed and was caught, or was rolled back. Call "
					 "idempotency.complete(), fail(), release(), renew() or checkpoint() with the "
					 "token again, or roll back and begin the retry with idempotency.claim().")));
}

/*
 * ErrorNoClaim reports that the caller has no claim to finish.  The caller
 * dooms the transaction before it calls this.
 */
void
ErrorNoClaim(const KeyName *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_NO_CLAIM),
			 errmsg("this transaction holds no claim on this idempotency key"), DetailName(name),
			 errhint("Call idempotency.claim() in the same transaction first, or pass the token "
					 "of the lease.")));
}

/*
 * ErrorNoLease reports a heartbeat or a checkpoint of a claim without a lease.
 * The caller dooms the transaction before it calls this.
 */
void
ErrorNoLease(const KeyName *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_NO_CLAIM),
			 errmsg("the claim on this idempotency key has no lease"), DetailName(name),
			 errhint("Claim with a lease, such as lease => '30 seconds', and pass its token.")));
}

/*
 * ErrorTransactionDoomed reports, at commit, that an error with this SQLSTATE was
 * caught; "name" is the operation it was about.
 */
void
ErrorTransactionDoomed(const KeyName *name, int sqlstate)
{
	ereport(ERROR,
			(errcode(sqlstate),
			 sqlstate == ERRCODE_IDEMPOTENCY_NO_CLAIM
				 ? errmsg("cannot commit after a call without a claim")
				 : errmsg("cannot commit after a lost lease"),
			 DetailName(name),
			 sqlstate == ERRCODE_IDEMPOTENCY_NO_CLAIM
				 ? errhint("Roll back, and claim and complete in one transaction, or pass the "
						   "token of the lease.")
				 : errhint("An error of complete(), fail(), release(), renew() or checkpoint() "
						   "was caught in this transaction. Roll back, and begin the retry with "
						   "idempotency.claim().")));
}

/*
 * ErrorKeyReused reports the same key with another request.
 */
void
ErrorKeyReused(const KeyName *name)
{
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_KEY_REUSED),
					errmsg("idempotency key was used with another request"), DetailName(name),
					errhint("A new request needs a new key; a retry repeats the request "
							"unchanged.")));
}

/*
 * ErrorNotCompleted reports, at commit or PREPARE TRANSACTION, that claims
 * are still open; "name" is the oldest of them.  "inBlock" tells a transaction that
 * BEGIN began from a statement that is one of its own.
 */
void
ErrorNotCompleted(const KeyName *name, int openClaims, bool preparing, bool inBlock)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_IDEMPOTENCY_NOT_COMPLETED),
		 preparing ? errmsg("cannot prepare a transaction with an open idempotency claim")
				   : errmsg("cannot commit a transaction with an open idempotency claim"),
		 openClaims == 1
			 ? DetailName(name)
			 : errdetail("Scope \"%s\", key \"%s\", and %d more.", text_to_cstring(name->scope),
						 text_to_cstring(name->key), openClaims - 1),
		 inBlock
			 ? errhint("Call idempotency.complete(), fail() or release() in the transaction "
					   "that claimed.")
			 : errhint("This statement was a transaction of its own (autocommit). Put BEGIN and "
					   "COMMIT around idempotency.claim(), your writes and "
					   "idempotency.complete(). A function that claims, and a procedure before "
					   "its own COMMIT, must also complete, fail or release.")));
}

/*
 * ErrorConcurrentChange reports that the record of the key changed under a
 * transaction that cannot, or must not, follow.
 */
void
ErrorConcurrentChange(const KeyName *name)
{
	ereport(ERROR, (errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
					errmsg("could not serialize access due to a concurrent idempotency key"),
					DetailName(name), errhint("Retry the transaction with the same key.")));
}

/*
 * ErrorScopeForbidden reports a scope outside the login role's prefix.
 */
void
ErrorScopeForbidden(const text *scope, const char *prefix)
{
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for idempotency scope \"%s\"", text_to_cstring(scope)),
			 errdetail("Scopes of this role begin with \"%s\".", prefix),
			 errhint("A superuser sets idempotency.scope_prefix per role.")));
}

/*
 * ErrorSettingRefused reports a setting whose value cannot be used, where it is
 * needed (setting.c).
 */
void
ErrorSettingRefused(const Setting *setting)
{
	if (setting->state == SETTING_DENIED)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to set parameter \"%s\"", setting->name),
				 errdetail("This session had set it before the library was loaded, so that the "
						   "value that a superuser has set is not known."),
				 errhint("Connect without setting it. A superuser sets it per role.")));

	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid value for parameter \"%s\": \"%s\"", setting->name, setting->text),
			 errdetail("It was stored before the library could check it. What needs the "
					   "setting is refused until its value is valid."),
			 errhint("Correct it with ALTER DATABASE, ALTER ROLE, ALTER FUNCTION or in "
					 "postgresql.conf, and connect again, or use SET.")));
}

/*
 * ErrorTooManyClaims reports that the shared lock table is full.
 */
void
ErrorTooManyClaims(const KeyName *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY), errmsg("too many idempotency claims at once"),
			 DetailName(name),
			 errhint("Each claim holds a lock until its transaction ends. Claim fewer keys in one "
					 "transaction, use idempotency.once_many(), or increase "
					 "max_locks_per_transaction.")));
}

/*
 * ErrorTooLarge reports a document above idempotency.max_response_size; "what"
 * says which.  If the setting was refused, every document is, and that is said.
 */
void
ErrorTooLarge(const KeyName *name, const char *what, Size bytes, int limit)
{
	RequireSetting(&ResponseSizeSetting);
	ereport(ERROR, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
					errmsg("%s of %zu bytes exceeds idempotency.max_response_size (%d bytes)", what,
						   bytes, limit),
					DetailName(name),
					errhint("Store a reference to the large part, or raise the setting.")));
}

/*
 * ErrorNotInstalled reports that the library is loaded but its tables are
 * not in this database.
 */
void
ErrorNotInstalled(void)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("extension \"idempotency\" is not installed in this database"),
					errhint("Use CREATE EXTENSION idempotency.")));
}

/*
 * ErrorExtensionReplaced reports that the extension was dropped, and perhaps made again, while
 * a call waited.
 */
void
ErrorExtensionReplaced(void)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("extension \"idempotency\" was dropped or replaced during the call"),
					errhint("Retry the transaction once the extension is installed.")));
}

/*
 * ErrorNotPreloaded reports a call that needs shared memory.
 */
void
ErrorNotPreloaded(void)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("library \"idempotency\" is not preloaded"),
					errdetail("Its counters are kept in shared memory."),
					errhint("Add idempotency to shared_preload_libraries, and restart the "
							"server.")));
}

/*
 * ErrorStoreAltered reports that the key store is not the table that the
 * extension made, so that writing past the executor would be unsafe.
 */
void
ErrorStoreAltered(const char *table, const char *why, const char *hint)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("table \"idempotency.%s\" is not as the extension made it", table),
					errdetail("%s", why), errhint("%s", hint)));
}

/*
 * ErrorSequenceMissing reports that nothing of that name gives out numbers.
 */
void
ErrorSequenceMissing(const char *sequence)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("sequence idempotency.%s is missing", sequence),
			 errdetail("It was dropped, renamed or moved."),
			 errhint("Take that back, or create one that begins above every number that was given "
					 "out.")));
}

/*
 * ErrorSequenceAltered reports that numbers could lie in wait unseen, or come twice.
 */
void
ErrorSequenceAltered(const char *sequence, const char *purpose)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("sequence idempotency.%s was altered", sequence),
			 errdetail("%s relies on numbers that are drawn one by one, and never again.", purpose),
			 errhint("Use ALTER SEQUENCE idempotency.%s INCREMENT 1 CACHE 1 NO CYCLE, and SET "
					 "LOGGED.",
					 sequence)));
}

/*
 * ErrorBadArgument reports an argument out of its range.
 */
void
ErrorBadArgument(const char *message, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("%s", message), errhint("%s", hint)));
}

/*
 * ErrorBadOutcome reports an outcome that nobody could replay.
 */
void
ErrorBadOutcome(const KeyName *name, const char *message, const char *hint)
{
	ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("%s", message),
					DetailName(name), errhint("%s", hint)));
}

/*
 * ErrorKeyDimensions reports an array of keys that is a matrix.
 */
void
ErrorKeyDimensions(void)
{
	ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
					errmsg("idempotency keys must be an array of one dimension"),
					errhint("Flatten the array, for instance with unnest().")));
}

/*
 * ErrorCalledForEachColumn reports that the columns of the result of "function" are
 * selected one by one, or by (f()).*.
 */
void
ErrorCalledForEachColumn(Oid function)
{
	const char *name = get_func_name(function);

	ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					errmsg("cannot select more than one column of idempotency.%s()", name),
					errdetail("The server calls the function once for each column."),
					errhint("Use SELECT * FROM idempotency.%s(...).", name)));
}

/*
 * ErrorEvaluatedTwice reports a call of "function" where the server may evaluate
 * it twice for one row; "command" is that of the query.
 */
void
ErrorEvaluatedTwice(Oid function, const char *command)
{
	const char *name = get_func_name(function);

	ereport(
		ERROR,
		(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
		 errmsg("cannot call idempotency.%s() in the conditions or values of %s", name, command),
		 errdetail("The server evaluates them again for a row that another transaction has "
				   "changed, and the second call finds what the first has stored."),
		 errhint("Call it before the statement, or in FROM, such as UPDATE ... FROM "
				 "idempotency.%s(...) AS result WHERE ....",
				 name)));
}

/*
 * ErrorNotATrigger reports a call of require_claim() from a query.
 */
void
ErrorNotATrigger(void)
{
	ereport(ERROR, (errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
					errmsg("idempotency.require_claim() was not called as a trigger"),
					errhint("Use CREATE TRIGGER ... EXECUTE FUNCTION "
							"idempotency.require_claim('scope').")));
}

/*
 * ErrorTriggerArguments reports a trigger with more than a scope.
 */
void
ErrorTriggerArguments(void)
{
	ereport(ERROR, (errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
					errmsg("idempotency.require_claim() takes one argument at most"),
					errhint("Pass a scope, which may end in \"*\".")));
}

/*
 * ErrorTriggerInstead reports a trigger INSTEAD OF a write: PostgreSQL would
 * take the write for done, and nothing would be written.
 */
void
ErrorTriggerInstead(const char *schema, const char *view)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
		 errmsg("idempotency.require_claim() was called INSTEAD OF a write to view \"%s.%s\"",
				schema, view),
		 errdetail("The write would be lost without a word."),
		 errhint("Create the trigger BEFORE or AFTER the write, on the table behind the view.")));
}

/*
 * ErrorHandlerMissing reports an OID that is no function's.
 */
void
ErrorHandlerMissing(Oid handler)
{
	ereport(ERROR, (errcode(ERRCODE_UNDEFINED_FUNCTION),
					errmsg("handler with OID %u does not exist", handler),
					errhint("Pass a function as regprocedure.")));
}

/*
 * ErrorHandlerSignature reports a function that run() cannot call.
 */
void
ErrorHandlerSignature(Oid handler)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
			 errmsg("function %s cannot be a handler", format_procedure(handler)),
			 errhint("A handler takes one argument of type idempotency.document (or json) and "
					 "returns json.")));
}

/*
 * ErrorRowType reports that a row type in the catalog is another version's, or
 * was altered.
 */
void
ErrorRowType(const char *type)
{
	ereport(ERROR, (errcode(ERRCODE_DATATYPE_MISMATCH),
					errmsg("type \"idempotency.%s\" is not as the library expects it", type),
					errhint("Use ALTER EXTENSION idempotency UPDATE, or take back what was done to "
							"it with ALTER TYPE.")));
}
