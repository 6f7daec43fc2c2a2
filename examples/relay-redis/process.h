/*-------------------------------------------------------------------------
 *
 * process.h
 *	  Log lines, signals, waits, and when to give up.
 *
 *-------------------------------------------------------------------------
 */
#ifndef PROCESS_H
#define PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* The exit codes. */
#define EXIT_STOPPED 0	   /* by a signal, or drained */
#define EXIT_REFUSED 1	   /* another attempt would be refused too */
#define EXIT_USAGE 2	   /* invalid command line */
#define EXIT_UNREACHABLE 3 /* PostgreSQL or Redis, for longer than --give-up */

/* The end of a wait. */
typedef enum Awaited
{
	AWAITED_READY,
	AWAITED_LATE,
	AWAITED_STOP
} Awaited;

/* The failures of one kind since its last success. */
typedef struct Backoff
{
	int failures;
	int64_t since; /* when the first of them was, in milliseconds */
} Backoff;

extern void ProcessBegin(const char *program);
extern void ProcessVerbose(void);
extern void ProcessGiveUpAfter(int64_t milliseconds);

extern void LogInfo(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern void LogDebug(const char *format, ...) __attribute__((format(printf, 1, 2)));

extern bool ExitRequested(void);
extern void RequestExit(int code);
extern int ExitCode(void);

extern int64_t Milliseconds(void);
extern Awaited Await(int fd, short events, int64_t until, bool heedStop);

extern bool Pause(int failures);
extern void BackoffFailed(Backoff *backoff);
extern void BackoffWorked(Backoff *backoff);
extern bool BackoffSleep(const Backoff *backoff);

#endif /* PROCESS_H */
