/*-------------------------------------------------------------------------
 *
 * patience.h
 *	  Log lines, signals, waiting, and when to give up.
 *
 *-------------------------------------------------------------------------
 */
#ifndef PATIENCE_H
#define PATIENCE_H

#include <stdbool.h>
#include <stdint.h>

/* The exit codes. */
#define EXIT_STOPPED 0	   /* by a signal, or because nothing was left to do */
#define EXIT_REFUSED 1	   /* what another try would not change */
#define EXIT_USAGE 2	   /* the command line */
#define EXIT_UNREACHABLE 3 /* PostgreSQL or Redis, for longer than --give-up */

/* How a wait ended. */
typedef enum Awaited
{
	AWAITED_READY,
	AWAITED_LATE,
	AWAITED_STOP
} Awaited;

/* The failures of one kind since it worked last. */
typedef struct Backoff
{
	int failures;
	int64_t since; /* when the first of them was, in milliseconds */
} Backoff;

extern void PatienceBegin(const char *program);
extern void PatienceVerbose(void);
extern void PatienceGiveUpAfter(int64_t milliseconds);

extern void Say(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern void Note(const char *format, ...) __attribute__((format(printf, 1, 2)));

extern bool Stopping(void);
extern void Leave(int code);
extern int ExitCode(void);

extern int64_t Milliseconds(void);
extern Awaited Await(int fd, short events, int64_t until, bool heedStop);

extern bool Pause(int failures);
extern void BackoffFailed(Backoff *backoff);
extern void BackoffWorked(Backoff *backoff);
extern bool BackoffSleep(const Backoff *backoff);

#endif /* PATIENCE_H */
