/*-------------------------------------------------------------------------
 *
 * postgres.h
 *	  A connection to PostgreSQL that reconnects.
 *
 *-------------------------------------------------------------------------
 */
#ifndef POSTGRES_CONNECTION_H
#define POSTGRES_CONNECTION_H

#include <libpq-fe.h>
#include <stdbool.h>
#include <stdint.h>

#include "process.h"

/* The result of a statement. */
typedef enum Answer
{
	ANSWER_OK,
	ANSWER_AGAIN,	/* refused for now, no effect: PostgresPause(), then try again */
	ANSWER_REFUSED, /* refused, no effect: another attempt would be refused too */
	ANSWER_LOST,	/* no answer: the effect is unknown */
	ANSWER_STOPPED	/* cancelled because the program must exit, no effect */
} Answer;

typedef struct Postgres
{
	const char *conninfo; /* NULL: the environment has all parameters */
	const char *name;	  /* application_name, unless conninfo has one */
	int64_t timeout;	  /* of an answer, in milliseconds */
	PGconn *connection;	  /* NULL: not connected */
	PGresult *result;	  /* of the last statement, or NULL */
	Backoff backoff;
	char state[6];	 /* SQLSTATE of the last statement, "" for success */
	char error[512]; /* and its message */
} Postgres;

extern bool PostgresCheck(const Postgres *postgres);
extern bool PostgresReady(Postgres *postgres);
extern bool PostgresPause(const Postgres *postgres);
extern void PostgresClose(Postgres *postgres);

extern Answer PostgresAsk(Postgres *postgres, const char *sql, int count,
						  const char *const *parameters);
extern Answer PostgresAskFor(Postgres *postgres, int64_t wait, const char *sql, int count,
							 const char *const *parameters);
extern const char *PostgresValue(const Postgres *postgres, int row, const char *column);

#endif /* POSTGRES_CONNECTION_H */
