/*-------------------------------------------------------------------------
 *
 * process.c
 *	  Log lines, signals, waits, and when to give up.
 *
 * This file is independent of the program's task. The first SIGTERM or SIGINT asks the
 * program to exit: it ends the waits with heedStop, and the loops that call ExitRequested().
 * A second signal kills it, which costs only a redelivery.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

/* The pause after the first failure, and the maximum. */
#define BACKOFF_FIRST_MS 100
#define BACKOFF_LONGEST_MS 10000

static const char *programName = "?";
static bool verbose = false;
static int64_t giveUpAfter = 0; /* 0: never */
static unsigned int dice;

static volatile sig_atomic_t stopping = 0;
static int exitCode = EXIT_STOPPED;

/* The signal handler writes to this pipe, so that a wait that has just begun ends. */
static int stopPipe[2];

/* ----------------------------------------------------------------
 * Log lines
 * ----------------------------------------------------------------
 */

/*
 * Write writes one line to stderr by one system call, so that lines logged before a
 * kill -9 are complete.
 */
static void
Write(const char *format, va_list arguments)
{
	char line[2048];
	char when[32];
	time_t now = time(NULL);
	int begun;
	int length;

	strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
	begun = snprintf(line, sizeof(line), "%s %s[%d]: ", when, programName, (int) getpid());
	length = vsnprintf(line + begun, sizeof(line) - 1 - (size_t) begun, format, arguments);
	length += begun;
	if (length > (int) sizeof(line) - 2)
		length = (int) sizeof(line) - 2;
	while (length > begun && line[length - 1] == '\n')
		length--;
	for (int at = begun; at < length; at++)
		if (line[at] == '\n')
			line[at] = ' ';
	line[length++] = '\n';
	(void) !write(STDERR_FILENO, line, (size_t) length);
}

/*
 * LogInfo logs a message for operators.
 */
void
LogInfo(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	Write(format, arguments);
	va_end(arguments);
}

/*
 * LogDebug logs a message only with --verbose.
 */
void
LogDebug(const char *format, ...)
{
	va_list arguments;

	if (!verbose)
		return;
	va_start(arguments, format);
	Write(format, arguments);
	va_end(arguments);
}

/* ----------------------------------------------------------------
 * Exiting
 * ----------------------------------------------------------------
 */

static void
StopHandler(int signal)
{
	int saved = errno;

	(void) signal;
	stopping = 1;
	(void) !write(stopPipe[1], "", 1);
	errno = saved;
}

/*
 * ProcessBegin installs the signal handlers; call it first.  "program" is the
 * name in the log.
 */
void
ProcessBegin(const char *program)
{
	/* A second signal gets the default action again. */
	struct sigaction stop = {.sa_handler = StopHandler, .sa_flags = (int) SA_RESETHAND};

	programName = program;
	dice = (unsigned int) getpid() ^ (unsigned int) time(NULL);
	if (pipe2(stopPipe, O_NONBLOCK | O_CLOEXEC) != 0)
	{
		LogInfo("pipe: %s", strerror(errno));
		exit(EXIT_REFUSED);
	}
	sigaction(SIGTERM, &stop, NULL);
	sigaction(SIGINT, &stop, NULL);
	signal(SIGPIPE, SIG_IGN);
}

/*
 * ProcessVerbose enables LogDebug().
 */
void
ProcessVerbose(void)
{
	verbose = true;
}

/*
 * ProcessGiveUpAfter sets how long an operation can fail before the program exits with
 * EXIT_UNREACHABLE; without it, never.
 */
void
ProcessGiveUpAfter(int64_t milliseconds)
{
	giveUpAfter = milliseconds;
}

/*
 * ExitRequested returns whether the program was asked to exit.
 */
bool
ExitRequested(void)
{
	return stopping != 0;
}

/*
 * RequestExit asks the program to exit, like a signal, with that exit code. The first reason
 * counts.
 */
void
RequestExit(int code)
{
	if (exitCode == EXIT_STOPPED)
		exitCode = code;
	StopHandler(0);
}

/*
 * ExitCode returns the exit code for main().
 */
int
ExitCode(void)
{
	return exitCode;
}

/* ----------------------------------------------------------------
 * Waiting
 * ----------------------------------------------------------------
 */

/*
 * Milliseconds returns a monotonic clock.
 */
int64_t
Milliseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/*
 * Await waits until the file descriptor (-1: none) is ready, the time "until" has come,
 * or, if heedStop, the program is asked to exit.
 */
Awaited
Await(int fd, short events, int64_t until, bool heedStop)
{
	for (;;)
	{
		struct pollfd wait[2] = {{.fd = fd, .events = events},
								 {.fd = heedStop ? stopPipe[0] : -1, .events = POLLIN}};
		int64_t left = until - Milliseconds();
		int ready;

		if (heedStop && ExitRequested())
			return AWAITED_STOP;
		if (left < 0)
			left = 0;
		ready = poll(wait, 2, left > 1000000 ? 1000000 : (int) left);
		if (ready > 0 && wait[0].revents != 0)
			return AWAITED_READY;
		if (ready == 0 && Milliseconds() >= until)
			return AWAITED_LATE;
	}
}

/*
 * BackoffFailed counts a failure.
 */
void
BackoffFailed(Backoff *backoff)
{
	if (backoff->failures++ == 0)
		backoff->since = Milliseconds();
}

/*
 * BackoffWorked resets the failures.
 */
void
BackoffWorked(Backoff *backoff)
{
	backoff->failures = 0;
}

/*
 * Pause sleeps after that many failures: twice as long each time, with random jitter,
 * so that clients do not reconnect at the same moment. Returns false if the program
 * must exit.
 */
bool
Pause(int failures)
{
	int64_t pause = BACKOFF_FIRST_MS;

	for (int doubled = 1; doubled < failures && pause < BACKOFF_LONGEST_MS; doubled++)
		pause *= 2;
	if (pause > BACKOFF_LONGEST_MS)
		pause = BACKOFF_LONGEST_MS;
	pause = pause / 2 + rand_r(&dice) % (pause / 2 + 1);
	return Await(-1, 0, Milliseconds() + pause, true) != AWAITED_STOP;
}

/*
 * BackoffSleep sleeps after a failure; without one it does not. Returns false if the
 * program must exit, also because the failures have lasted too long.
 */
bool
BackoffSleep(const Backoff *backoff)
{
	if (backoff->failures == 0)
		return !ExitRequested();
	if (giveUpAfter > 0 && Milliseconds() - backoff->since >= giveUpAfter)
	{
		LogInfo("giving up after %d failures", backoff->failures);
		RequestExit(EXIT_UNREACHABLE);
		return false;
	}
	return Pause(backoff->failures);
}
