/*-------------------------------------------------------------------------
 *
 * tally.c
 *	  Counters of events, and reports of violations.
 *
 * Any thread can count; the counters are atomic. A separate lock serializes the lines
 * of violations.
 *
 *-------------------------------------------------------------------------
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "plan.h"
#include "tally.h"

/* Maximum number of printed violations of each check, and of checks. */
#define SHOWN_VIOLATIONS 5
#define MOST_CHECKS 32

static const struct
{
	const char *text;
	int retries; /* the minimum of a full run */
	int leases;
} tallies[TALLY_COUNT] = {
#define TALLY_TEXT(name, text, retries, leases) {text, retries, leases},
	TALLY_LIST(TALLY_TEXT)
#undef TALLY_TEXT
};

static atomic_llong counters[TALLY_COUNT];
static atomic_int violations;
static struct
{
	const char *name;
	int count;
} checks[MOST_CHECKS];

void
Count(Tally tally)
{
	atomic_fetch_add(&counters[tally], 1);
}

long long
Counted(Tally tally)
{
	return atomic_load(&counters[tally]);
}

/*
 * CountError counts an error, if it is one that is counted. The texts of these start
 * with the SQLSTATE.
 */
void
CountError(const char *sqlstate)
{
	for (int i = 0; i < TALLY_COUNT; i++)
	{
		if (strncmp(tallies[i].text, sqlstate, 5) == 0)
			Count((Tally) i);
	}
}

/*
 * Least returns the minimum of a counter in a full run of the workload, or ABSENT.
 */
static int
Least(int tally)
{
	return IsLeased() ? tallies[tally].leases : tallies[tally].retries;
}

/*
 * TallyPrint prints the counters of the workload, two in a line, and the checks that failed.
 */
void
TallyPrint(void)
{
	int printed = 0;

	for (int i = 0; i < TALLY_COUNT; i++)
	{
		if (Least(i) != ABSENT)
			printf("%s%8lld  %-36s%s", printed % 2 == 0 ? "  " : "", Counted((Tally) i),
				   tallies[i].text, printed % 2 == 1 ? "\n" : "");
		printed += Least(i) != ABSENT;
	}
	printf("%s", printed % 2 == 1 ? "\n" : "");
	for (int i = 0; i < MOST_CHECKS && checks[i].count > 0; i++)
		printf("  %8d  violations of %.*s\n", checks[i].count,
			   (int) strcspn(checks[i].name, "]") + 1, checks[i].name);
}

/*
 * TallyCheck reports counters below the minimum of a full run: the run did not test
 * these cases.
 */
void
TallyCheck(void)
{
	if (config.operations < config.workload->fullOperations ||
		config.clients < config.workload->fullClients)
		return;
	for (int i = 0; i < TALLY_COUNT; i++)
	{
		if (Counted((Tally) i) < Least(i))
			Violation("[coverage] never seen: %s", tallies[i].text);
	}
}

/*
 * CountViolation counts a violation of its check, whose name is in brackets at the
 * start of "text". Returns the number of its violations.
 */
static int
CountViolation(const char *text)
{
	size_t length = strcspn(text, "]") + 1;
	int i = 0;

	while (i < MOST_CHECKS - 1 && checks[i].count > 0 && strncmp(checks[i].name, text, length) != 0)
		i++;
	checks[i].name = text;
	return ++checks[i].count;
}

/*
 * Violation reports an error of the tested library. The text starts with the name of
 * the check, in brackets. Only the first few of each check are printed.
 */
void
Violation(const char *format, ...)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	va_list arguments;

	atomic_fetch_add(&violations, 1);
	pthread_mutex_lock(&lock);
	if (CountViolation(format) <= SHOWN_VIOLATIONS)
	{
		fputs("VIOLATION ", stdout);
		va_start(arguments, format);
		vprintf(format, arguments);
		va_end(arguments);
		fputc('\n', stdout);
		fflush(stdout);
	}
	pthread_mutex_unlock(&lock);
}

int
Violations(void)
{
	return atomic_load(&violations);
}
