/*-------------------------------------------------------------------------
 *
 * postgres.c
 *	  A connection to PostgreSQL that reconnects.
 *
 * This file never repeats a statement: the caller must decide what a lost answer means.
 * A statement without an answer in time counts as lost, and so does the connection.
 *
 *-------------------------------------------------------------------------
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "postgres.h"

/* ----------------------------------------------------------------
 * Connecting
 * ----------------------------------------------------------------
 */

/*
 * PostgresCheck returns whether the connection string is valid, and prints the error.
 */
bool
PostgresCheck(const Postgres *postgres)
{
	char *error = NULL;
	PQconninfoOption *options;

	if (postgres->conninfo == NULL || strpbrk(postgres->conninfo, "=:") == NULL)
		return true;
	options = PQconninfoParse(postgres->conninfo, &error);
	if (options == NULL)
		LogInfo("%s", error ? error : "out of memory");
	PQfreemem(error);
	PQconninfoFree(options);
	return options != NULL;
}

/*
 * PostgresClose ends the connection, if there is one.
 */
void
PostgresClose(Postgres *postgres)
{
	PQclear(postgres->result);
	postgres->result = NULL;
	PQfinish(postgres->connection);
	postgres->connection = NULL;
}

/*
 * Lose ends a connection that is unusable. Always returns false.
 */
static bool
Lose(Postgres *postgres, const char *why)
{
	LogInfo("PostgreSQL: %s", why);
	BackoffFailed(&postgres->backoff);
	PostgresClose(postgres);
	return false;
}

static void
NoteNotice(void *argument, const char *message)
{
	(void) argument;
	LogDebug("PostgreSQL: %s", message);
}

/*
 * Connect tries to connect once. Returns false, and prints the error, if that fails, or
 * if the program must exit.
 */
static bool
Connect(Postgres *postgres)
{
	static const char *const keywords[] = {"fallback_application_name", "client_encoding", "dbname",
										   NULL};
	const char *const values[] = {postgres->name, "UTF8", postgres->conninfo, NULL};
	int64_t until = Milliseconds() + postgres->timeout;
	PostgresPollingStatusType status = PGRES_POLLING_WRITING;

	postgres->connection = PQconnectStartParams(keywords, values, 1);
	if (postgres->connection == NULL)
		return Lose(postgres, "out of memory");
	while (PQstatus(postgres->connection) != CONNECTION_BAD && status != PGRES_POLLING_OK &&
		   status != PGRES_POLLING_FAILED)
	{
		short events = status == PGRES_POLLING_READING ? POLLIN : POLLOUT;

		switch (Await(PQsocket(postgres->connection), events, until, true))
		{
			case AWAITED_READY:
				status = PQconnectPoll(postgres->connection);
				break;
			case AWAITED_LATE:
				return Lose(postgres, "no connection in time");
			case AWAITED_STOP:
				PostgresClose(postgres);
				return false;
		}
	}
	if (PQstatus(postgres->connection) != CONNECTION_OK)
		return Lose(postgres, PQerrorMessage(postgres->connection));

	PQsetNoticeProcessor(postgres->connection, NoteNotice, NULL);
	if (postgres->backoff.failures > 0)
		LogInfo("PostgreSQL: connected again");
	return true;
}

/*
 * PostgresReady connects if needed, and retries until it succeeds. Returns false if the
 * program must exit.
 */
bool
PostgresReady(Postgres *postgres)
{
	while (postgres->connection == NULL)
	{
		if (!BackoffSleep(&postgres->backoff))
			return false;
		(void) Connect(postgres);
	}
	return true;
}

/*
 * PostgresPause sleeps after an ANSWER_AGAIN. Returns false if the program must exit.
 */
bool
PostgresPause(const Postgres *postgres)
{
	return BackoffSleep(&postgres->backoff);
}

/* ----------------------------------------------------------------
 * Statements
 * ----------------------------------------------------------------
 */

static void
Cancel(Postgres *postgres)
{
	char error[256];
	PGcancel *cancel = PQgetCancel(postgres->connection);

	if (cancel != NULL && !PQcancel(cancel, error, sizeof(error)))
		LogDebug("PostgreSQL: %s", error);
	PQfreeCancel(cancel);
}

/*
 * Collect reads the server's answer, and keeps the last result. With heedStop, the
 * statement is cancelled when the program must exit; its answer is still read. Returns
 * false if the connection is lost.
 */
static bool
Collect(Postgres *postgres, int64_t until, bool heedStop)
{
	PGresult *next;

	do
	{
		while (PQisBusy(postgres->connection))
		{
			Awaited awaited = Await(PQsocket(postgres->connection), POLLIN, until, heedStop);

			if (awaited == AWAITED_LATE)
				return Lose(postgres, "no answer in time");
			if (awaited == AWAITED_STOP)
			{
				Cancel(postgres);
				heedStop = false;
				until = Milliseconds() + postgres->timeout;
			}
			else if (!PQconsumeInput(postgres->connection))
				return Lose(postgres, PQerrorMessage(postgres->connection));
		}
		next = PQgetResult(postgres->connection);
		if (next != NULL)
		{
			PQclear(postgres->result);
			postgres->result = next;
		}
	} while (next != NULL);
	return true;
}

/*
 * ClassifyError classifies an error.
 *
 * A server that shuts down, or that has become a standby, answers but cannot be used:
 * the next connection can find a better one.
 */
static Answer
ClassifyError(Postgres *postgres)
{
	static const char *const gone[] = {"08", "57P0", "25006", NULL};
	static const char *const passing[] = {"40", "53", "55P03", "57014", "IK409", NULL};
	const char *state = PQresultErrorField(postgres->result, PG_DIAG_SQLSTATE);
	const char *message = PQresultErrorField(postgres->result, PG_DIAG_MESSAGE_PRIMARY);
	const char *detail = PQresultErrorField(postgres->result, PG_DIAG_MESSAGE_DETAIL);

	snprintf(postgres->state, sizeof(postgres->state), "%s", state ? state : "08006");
	snprintf(postgres->error, sizeof(postgres->error), "%s: %s%s%s", postgres->state,
			 message ? message : PQresultErrorMessage(postgres->result), detail ? "; " : "",
			 detail ? detail : "");
	for (int at = 0; gone[at] != NULL; at++)
		if (strncmp(postgres->state, gone[at], strlen(gone[at])) == 0)
		{
			(void) Lose(postgres, postgres->error);
			return ANSWER_LOST;
		}
	for (int at = 0; passing[at] != NULL; at++)
		if (strncmp(postgres->state, passing[at], strlen(passing[at])) == 0)
		{
			BackoffFailed(&postgres->backoff);
			return ANSWER_AGAIN;
		}
	BackoffWorked(&postgres->backoff);
	return ANSWER_REFUSED;
}

/*
 * Ask sends a statement and waits for its answer. The result, or the error, is valid
 * until the next statement.
 */
static Answer
Ask(Postgres *postgres, int64_t within, bool heedStop, const char *sql, int count,
	const char *const *parameters)
{
	ExecStatusType status;

	PQclear(postgres->result);
	postgres->result = NULL;
	postgres->state[0] = postgres->error[0] = '\0';

	if (postgres->connection == NULL)
		return ANSWER_LOST;
	if (!PQsendQueryParams(postgres->connection, sql, count, NULL, parameters, NULL, NULL, 0))
	{
		(void) Lose(postgres, PQerrorMessage(postgres->connection));
		return ANSWER_LOST;
	}
	if (!Collect(postgres, Milliseconds() + within, heedStop))
		return ANSWER_LOST;

	status = PQresultStatus(postgres->result);
	if (status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK)
	{
		BackoffWorked(&postgres->backoff);
		return ANSWER_OK;
	}
	return ClassifyError(postgres);
}

/*
 * PostgresAsk runs a statement that is answered at once. It works without a connection:
 * then the answer is lost.
 */
Answer
PostgresAsk(Postgres *postgres, const char *sql, int count, const char *const *parameters)
{
	return Ask(postgres, postgres->timeout, false, sql, count, parameters);
}

/*
 * PostgresAskFor runs a statement that can wait in the server for "wait" milliseconds,
 * and is cancelled when the program must exit.
 */
Answer
PostgresAskFor(Postgres *postgres, int64_t wait, const char *sql, int count,
			   const char *const *parameters)
{
	Answer answer = Ask(postgres, postgres->timeout + wait, true, sql, count, parameters);

	if (answer == ANSWER_AGAIN && ExitRequested() && strcmp(postgres->state, "57014") == 0)
		return ANSWER_STOPPED;
	return answer;
}

/*
 * PostgresValue returns a field of the last result, NULL for NULL. The field is valid
 * as long as the result.
 */
const char *
PostgresValue(const Postgres *postgres, int row, const char *column)
{
	int number = PQfnumber(postgres->result, column);

	return PQgetisnull(postgres->result, row, number) ? NULL
													  : PQgetvalue(postgres->result, row, number);
}
