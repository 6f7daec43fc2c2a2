/*-------------------------------------------------------------------------
 *
 * errors.h
 *	  The errors that users see: one function each, so that a message, its
 *	  SQLSTATE and its hint are written once.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ERRORS_H
#define IDEMPOTENCY_ERRORS_H

#include "datatype/timestamp.h"

#include "keyname.h"
#include "setting.h"

/* The HTTP status of the IETF draft stands in the last three digits. */
#define ERRCODE_IDEMPOTENCY_BAD_KEY MAKE_SQLSTATE('I', 'K', '4', '0', '0')
#define ERRCODE_IDEMPOTENCY_CLAIM_REQUIRED MAKE_SQLSTATE('I', 'K', '4', '0', '3')
#define ERRCODE_IDEMPOTENCY_BATCH_LOST MAKE_SQLSTATE('I', 'K', '4', '0', '8')
#define ERRCODE_IDEMPOTENCY_IN_PROGRESS MAKE_SQLSTATE('I', 'K', '4', '0', '9')
#define ERRCODE_IDEMPOTENCY_CLAIM_LOST MAKE_SQLSTATE('I', 'K', '4', '1', '0')
#define ERRCODE_IDEMPOTENCY_NO_CLAIM MAKE_SQLSTATE('I', 'K', '4', '1', '2')
#define ERRCODE_IDEMPOTENCY_KEY_REUSED MAKE_SQLSTATE('I', 'K', '4', '2', '2')
#define ERRCODE_IDEMPOTENCY_NOT_COMPLETED MAKE_SQLSTATE('I', 'K', '4', '2', '8')

/* IK400 */
pg_noreturn extern void ErrorNameMissing(const char *what);
pg_noreturn extern void ErrorNameTooLong(const char *what, int chars);
pg_noreturn extern void ErrorControlCharacter(const char *what, int position);
pg_noreturn extern void ErrorKeyIsArray(void);
pg_noreturn extern void ErrorRequestAndFingerprint(const KeyName *name);
pg_noreturn extern void ErrorFingerprintLength(const KeyName *name, int bytes);
pg_noreturn extern void ErrorNoKeyParts(void);
pg_noreturn extern void ErrorMalformedHeader(const char *reason);

/* IK403 */
pg_noreturn extern void ErrorClaimRequired(const char *schema, const char *table,
										   const char *scopePattern, bool asked);

/* IK409 */
pg_noreturn extern void ErrorInProgress(const KeyName *name);
pg_noreturn extern void ErrorLeased(const KeyName *name, TimestampTz until);
pg_noreturn extern void ErrorClaimedHere(const KeyName *name);

/* IK410 */
pg_noreturn extern void ErrorLeaseLost(const KeyName *name, int64 token);
pg_noreturn extern void ErrorTokenUnproven(const KeyName *name, int64 token);

/* IK412 */
pg_noreturn extern void ErrorNoClaim(const KeyName *name);
pg_noreturn extern void ErrorNoLease(const KeyName *name);

/* IK410 or IK412 */
pg_noreturn extern void ErrorTransactionDoomed(const KeyName *name, int sqlstate);

/* IK422 */
pg_noreturn extern void ErrorKeyReused(const KeyName *name);

/* IK428 */
pg_noreturn extern void ErrorNotCompleted(const KeyName *name, int openClaims, bool preparing,
										  bool inBlock);

/* 40001 */
pg_noreturn extern void ErrorConcurrentChange(const KeyName *name);

/* 42501 */
pg_noreturn extern void ErrorScopeForbidden(const text *scope, const char *prefix);

/* 22023, 42501 */
pg_noreturn extern void ErrorSettingRefused(const Setting *setting);

/* 53200 */
pg_noreturn extern void ErrorTooManyClaims(const KeyName *name);

/* 54000 */
pg_noreturn extern void ErrorTooLarge(const KeyName *name, const char *what, Size bytes, int limit);

/* 55000 */
pg_noreturn extern void ErrorNotInstalled(void);
pg_noreturn extern void ErrorExtensionReplaced(void);
pg_noreturn extern void ErrorNotPreloaded(void);
pg_noreturn extern void ErrorStoreAltered(const char *table, const char *why, const char *hint);
pg_noreturn extern void ErrorSequenceMissing(const char *sequence);
pg_noreturn extern void ErrorSequenceAltered(const char *sequence, const char *purpose);

/* 22023 */
pg_noreturn extern void ErrorBadArgument(const char *message, const char *hint);
pg_noreturn extern void ErrorBadOutcome(const KeyName *name, const char *message, const char *hint);

/* 2202E, 39P01, 42883, 42P13, 42804 */
pg_noreturn extern void ErrorKeyDimensions(void);
pg_noreturn extern void ErrorCalledForEachColumn(Oid function);
pg_noreturn extern void ErrorEvaluatedTwice(Oid function, const char *command);
pg_noreturn extern void ErrorNotATrigger(void);
pg_noreturn extern void ErrorTriggerArguments(void);
pg_noreturn extern void ErrorTriggerInstead(const char *schema, const char *view);
pg_noreturn extern void ErrorHandlerMissing(Oid handler);
pg_noreturn extern void ErrorHandlerSignature(Oid handler);
pg_noreturn extern void ErrorRowType(const char *type);

#endif /* IDEMPOTENCY_ERRORS_H */
