/*-------------------------------------------------------------------------
 *
 * arguments.h
 *	  The common command-line options of both programs.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ARGUMENTS_H
#define ARGUMENTS_H

#include <stdint.h>

#include "postgres.h"
#include "redis.h"

/* Both programs have these options. */
#define COMMON_OPTIONS                                                                             \
	{"dbname", required_argument, NULL, 'd'}, {"redis", required_argument, NULL, 'r'},             \
		{"batch", required_argument, NULL, 'b'}, {"timeout", required_argument, NULL, 't'},        \
		{"give-up", required_argument, NULL, 'g'}, {"drain", no_argument, NULL, 'D'},              \
		{"verbose", no_argument, NULL, 'v'}, {"help", no_argument, NULL, 'h'},                     \
	{                                                                                              \
		NULL, 0, NULL, 0                                                                           \
	}

typedef struct Common
{
	const char *redis;
	int batch;
	int64_t timeout;
	bool drain;
} Common;

#define COMMON_DEFAULTS                                                                            \
	{                                                                                              \
		.redis = "redis://localhost", .batch = 100, .timeout = 10000                               \
	}

/* The text of --help for them. */
#define COMMON_HELP                                                                                \
	"  -d, --dbname=CONNINFO     PostgreSQL, as for psql; missing parts come from PGHOST and so\n" \
	"                            on, or the service file\n"                                        \
	"  -r, --redis=URL           redis://[user@]host[:port][/database] or unix:///path\n"          \
	"                            (default redis://localhost); the password is taken from the\n"    \
	"                            environment variable REDISCLI_AUTH\n"

extern void Usage(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
extern int ParseCount(const char *option, const char *text, long most);
extern int64_t ParseSeconds(const char *option, const char *text);
extern bool CommonOption(Common *common, Postgres *postgres, int option, const char *value);
extern void CommonEnd(const Common *common, Postgres *postgres, Redis *redis, const char *name);

#endif /* ARGUMENTS_H */
