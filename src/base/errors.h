/*-------------------------------------------------------------------------
 *
 * base/errors.h
 *	  SQLSTATEs, and the errors that more than one file throws.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_ERRORS_H
#define IDEMPOTENCY_BASE_ERRORS_H

#include "datatype/timestamp.h"

#include "base/name.h"

/* The last three digits are an HTTP status. */
#define ERRCODE_IDEMPOTENCY_BAD_KEY MAKE_SQLSTATE('I', 'K', '4', '0', '0')
#define ERRCODE_IDEMPOTENCY_CLAIM_REQUIRED MAKE_SQLSTATE('I', 'K', '4', '0', '3')
#define ERRCODE_IDEMPOTENCY_BATCH_LOST MAKE_SQLSTATE('I', 'K', '4', '0', '8')
#define ERRCODE_IDEMPOTENCY_IN_PROGRESS MAKE_SQLSTATE('I', 'K', '4', '0', '9')
#define ERRCODE_IDEMPOTENCY_CLAIM_LOST MAKE_SQLSTATE('I', 'K', '4', '1', '0')
#define ERRCODE_IDEMPOTENCY_NO_CLAIM MAKE_SQLSTATE('I', 'K', '4', '1', '2')
#define ERRCODE_IDEMPOTENCY_KEY_REUSED MAKE_SQLSTATE('I', 'K', '4', '2', '2')
#define ERRCODE_IDEMPOTENCY_NOT_COMPLETED MAKE_SQLSTATE('I', 'K', '4', '2', '8')

/* An error of a user's function that is final. */
#define ERRCODE_IDEMPOTENCY_FINAL MAKE_SQLSTATE('I', 'K', 'F', 'I', 'N')

/* Details for errors in other files. */
extern int DetailName(const KeyName *name);
extern int DetailToken(const KeyName *name, int64 token);

/* IK400 */
pg_noreturn extern void ErrorNameMissing(const char *what);
pg_noreturn extern void ErrorNameTooLong(const char *what, int chars);

/* IK409 */
pg_noreturn extern void ErrorInProgress(const KeyName *name, TimestampTz until, const char *logged);
pg_noreturn extern void ErrorClaimedHere(const KeyName *name);

/* 22023 */
pg_noreturn extern void ErrorBadArgument(const char *message, const char *hint);

/* 40001 */
pg_noreturn extern void ErrorConcurrentChange(const KeyName *name);

/* 42804 */
pg_noreturn extern void ErrorRowType(const char *type);

/* 55000 */
pg_noreturn extern void ErrorNotInstalled(void);
pg_noreturn extern void ErrorStoreAltered(const char *table, const char *why, const char *hint);

extern void LogCall(const char *function, const char *what);
extern char *ClipForLog(const char *message);

#endif /* IDEMPOTENCY_BASE_ERRORS_H */
