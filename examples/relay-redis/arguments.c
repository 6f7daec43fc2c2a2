/*-------------------------------------------------------------------------
 *
 * arguments.c
 *	  What both programs read from their command line.
 *
 *-------------------------------------------------------------------------
 */
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "arguments.h"

/* Longer waits than this are mistakes. */
#define MOST_SECONDS 1000000

/*
 * Usage says what is wrong with the command line, and leaves.
 */
void
Usage(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputs("\nTry --help.\n", stderr);
	exit(EXIT_USAGE);
}

/*
 * ParseCount reads a number from 1 to "most".
 */
int
ParseCount(const char *option, const char *text, long most)
{
	char *end;
	long count = strtol(text, &end, 10);

	if (end == text || *end != '\0' || count < 1 || count > most)
		Usage("--%s takes a number from 1 to %ld, not \"%s\"", option, most, text);
	return (int) count;
}

/*
 * ParseSeconds reads seconds, which may have a fraction, and returns milliseconds.
 */
int64_t
ParseSeconds(const char *option, const char *text)
{
	char *end;
	double seconds = strtod(text, &end);

	if (end == text || *end != '\0' || !(seconds >= 0.001 && seconds <= MOST_SECONDS))
		Usage("--%s takes seconds, more than 0, not \"%s\"", option, text);
	return (int64_t) (seconds * 1000);
}

/*
 * CommonOption takes one of the options that both programs have.  Returns false if
 * it is none of them.
 */
bool
CommonOption(Common *common, Postgres *postgres, int option, const char *value)
{
	switch (option)
	{
		case 'd':
			postgres->conninfo = value;
			return true;
		case 'r':
			common->redis = value;
			return true;
		case 'b':
			common->batch = ParseCount("batch", value, 100000);
			return true;
		case 't':
			common->timeout = ParseSeconds("timeout", value);
			return true;
		case 'g':
			PatienceGiveUpAfter(ParseSeconds("give-up", value));
			return true;
		case 'D':
			common->drain = true;
			return true;
		case 'v':
			PatienceVerbose();
			return true;
		default:
			return false;
	}
}

/*
 * CommonEnd makes what the common options say ready for use.
 */
void
CommonEnd(const Common *common, Postgres *postgres, Redis *redis, const char *name)
{
	postgres->name = name;
	postgres->timeout = common->timeout;
	if (!PostgresCheck(postgres))
		exit(EXIT_USAGE);
	redis->name = name;
	redis->timeout = common->timeout;
	if (!RedisParse(redis, common->redis))
		Usage("--redis: \"%s\" is neither redis://[user@]host[:port][/database] nor unix:///path",
			  common->redis);
}
