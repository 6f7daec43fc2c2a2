/*-------------------------------------------------------------------------
 *
 * arguments.c
 *	  The common command-line options of both programs.
 *
 *-------------------------------------------------------------------------
 */
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "arguments.h"

/* Longer waits than this are errors. */
#define MOST_SECONDS 1000000

/*
 * Usage prints the error in the command line, and exits.
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
		Usage("--%s must be a number from 1 to %ld, not \"%s\"", option, most, text);
	return (int) count;
}

/*
 * ParseSeconds reads seconds, which can have a fraction, and returns milliseconds.
 */
int64_t
ParseSeconds(const char *option, const char *text)
{
	char *end;
	double seconds = strtod(text, &end);

	if (end == text || *end != '\0' || !(seconds >= 0.001 && seconds <= MOST_SECONDS))
		Usage("--%s must be a positive number of seconds, not \"%s\"", option, text);
	return (int64_t) (seconds * 1000);
}

/*
 * CommonOption reads one of the options that both programs have. Returns false for any
 * other option.
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
			ProcessGiveUpAfter(ParseSeconds("give-up", value));
			return true;
		case 'D':
			common->drain = true;
			return true;
		case 'v':
			ProcessVerbose();
			return true;
		default:
			return false;
	}
}

/*
 * CommonEnd prepares the values of the common options for use.
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
