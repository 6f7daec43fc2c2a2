/*-------------------------------------------------------------------------
 *
 * postgres.h
 *	  A connection to PostgreSQL that comes back.
 *
 *-------------------------------------------------------------------------
 */
#ifndef POSTGRES_CONNECTION_H
#define POSTGRES_CONNECTION_H

#include <libpq-fe.h>
#include <stdbool.h>
#include <stdint.h>

#include "patience.h"

/* What became of a statement. */
typedef enum Answer
{
	ANSWER_OK,
	ANSWER_AGAIN,	/* refused for now: nothing was done; PostgresPause(), then try again */
	ANSWER_REFUSED, /* refused: nothing was done, and another try changes nothing */
	ANSWER_LOST,	/* no answer: nobody knows whether it was done */
	ANSWER_STOPPED	/* cancelled, since the program is to leave: nothing was done */
} Answer;

typedef struct Postgres
{
	const char *conninfo; /* NULL: the environment says it all */
	const char *name;	  /* application_name, unless conninfo has one */
	int64_t timeout;	  /* how long an answer may take, in milliseconds */
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
