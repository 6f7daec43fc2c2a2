/*-------------------------------------------------------------------------
 *
 * session.c
 *	  A client's connection, and what the network does to it.
 *
 * Ask() is all that the other rooms do with a connection.  Every error that
 * it meets is counted, or else is a violation: each attempt says which errors
 * it may meet.  In particular, nobody may be cancelled whom nobody cancelled.
 *
 * A session belongs to one thread; only its pid is read by others.
 *
 *-------------------------------------------------------------------------
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "session.h"
#include "tally.h"

/* No question of this test takes nearly as long: something hangs. */
#define HANG_SECONDS 120

/* How long the sessions of dropped connections may take to leave. */
#define SECONDS_TO_LEAVE 60

/*
 * A deadlock should cost little time; a log full of the errors that the test
 * provokes would cost much.
 */
#define OPTIONS                                                                                    \
	"-c deadlock_timeout=5ms -c log_min_messages=fatal -c log_min_error_statement=fatal "          \
	"-c client_min_messages=error"

/* How long a server may take to come back; 0: it must be there. */
int serverPatience = 0;

int64_t
Microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t) now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

void
SleepMicroseconds(int64_t microseconds)
{
	struct timespec length = {microseconds / 1000000, microseconds % 1000000 * 1000};

	nanosleep(&length, NULL);
}

/* ----------------------------------------------------------------
 * Connecting
 * ----------------------------------------------------------------
 */

/*
 * Ignore is what becomes of the server's messages on the side, as that it is
 * terminating a connection.
 */
static void
Ignore(void *argument, const PGresult *notice)
{
	(void) argument;
	(void) notice;
}

/*
 * Connect connects, if need be to a server that is about to restart.
 */
static void
Connect(Session *session)
{
	int64_t end = Microseconds() + (int64_t) serverPatience * 1000000;
	char options[512];
	const char *wrong = getenv("STRESS_BREAK");

	snprintf(options, sizeof(options), "%s -c stress.break=%s", OPTIONS, wrong ? wrong : "");
	for (;;)
	{
		session->conn =
			PQconnectdbParams((const char *const[]){"options", "application_name", NULL},
							  (const char *const[]){options, session->name, NULL}, 0);
		if (PQstatus(session->conn) == CONNECTION_OK)
			break;
		if (Microseconds() >= end)
		{
			fprintf(stderr, "stress: %s", PQerrorMessage(session->conn));
			exit(2);
		}
		PQfinish(session->conn);
		SleepMicroseconds(20000);
	}
	PQsetNoticeReceiver(session->conn, Ignore, NULL);
	session->cancel = PQgetCancel(session->conn);
	atomic_store(&session->pid, PQbackendPID(session->conn));
	session->lost = false;
}

static void
Disconnect(Session *session)
{
	atomic_store(&session->pid, 0);
	PQclear(session->result);
	session->result = NULL;
	PQfreeCancel(session->cancel);
	session->cancel = NULL;
	PQfinish(session->conn);
	session->conn = NULL;
}

/*
 * SessionOpen connects to the server that the environment names.  Exits with
 * 2 if it cannot.
 */
void
SessionOpen(Session *session, const char *name)
{
	memset(session, 0, sizeof(*session));
	session->name = name;
	Connect(session);
}

void
SessionClose(Session *session)
{
	Disconnect(session);
}

/* ----------------------------------------------------------------
 * Asking
 * ----------------------------------------------------------------
 */

/*
 * Lose notes that the connection is gone; Settle makes another.
 */
static void
Lose(Session *session)
{
	session->lost = true;
	strcpy(session->state, "08006");
}

/*
 * SessionDrop loses the connection as a broken network does: nothing is said to
 * the server, and what it has sent already is not read.
 */
void
SessionDrop(Session *session)
{
	if (session->lost)
		return;
	Count(TALLY_DROPPED);
	shutdown(PQsocket(session->conn), SHUT_RDWR);
	Lose(session);
}

static void
SendCancel(Session *session)
{
	char error[256];

	session->fuse = FUSE_NONE;
	session->cancelled = true;
	if (PQcancel(session->cancel, error, sizeof(error)))
		Count(TALLY_CANCELS);
}

/*
 * Hang says what everybody waits for, and ends the run.
 */
static void
Hang(Session *session)
{
	Session other;
	PGresult *all;

	Violation("[hang] no answer for %d seconds to backend %d", HANG_SECONDS, session->pid);
	SessionOpen(&other, "stress autopsy");
	all = PQexec(other.conn,
				 "SELECT a.pid, a.state, a.wait_event, pg_blocking_pids(a.pid), left(a.query, 150) "
				 "FROM pg_stat_activity a WHERE a.datname = current_database()");
	for (int row = 0; row < PQntuples(all); row++)
		printf("  %s | %s | %s | %s | %s\n", PQgetvalue(all, row, 0), PQgetvalue(all, row, 1),
			   PQgetvalue(all, row, 2), PQgetvalue(all, row, 3), PQgetvalue(all, row, 4));
	fflush(stdout);
	_exit(1);
}

/*
 * WaitReadable waits until the server has sent something, and does what the
 * fuse says if that comes first.  Returns false if the connection is lost.
 */
static bool
WaitReadable(Session *session)
{
	int64_t hung = Microseconds() + (int64_t) HANG_SECONDS * 1000000;

	for (;;)
	{
		struct pollfd socket = {.fd = PQsocket(session->conn), .events = POLLIN};
		int64_t now = Microseconds();
		int64_t end = session->fuse == FUSE_NONE ? hung : session->fuseEnd;
		struct timespec left = {0, 0};
		int ready;

		if (end > now)
			left = (struct timespec){(end - now) / 1000000, (end - now) % 1000000 * 1000};
		ready = ppoll(&socket, 1, &left, NULL);
		if (ready > 0 || (ready < 0 && errno != EINTR))
			return true;
		if (ready < 0)
			continue;

		if (session->fuse == FUSE_CANCEL)
			SendCancel(session);
		else if (session->fuse == FUSE_DROP)
		{
			SessionDrop(session);
			return false;
		}
		else
			Hang(session);
	}
}

/*
 * Keep makes "next" the session's result if it says more than what is there:
 * an error says most, and rows say more than none.
 */
static void
Keep(Session *session, PGresult *next)
{
	if (session->result != NULL && PQresultStatus(session->result) == PGRES_TUPLES_OK &&
		PQresultStatus(next) == PGRES_COMMAND_OK)
	{
		PQclear(next);
		return;
	}
	PQclear(session->result);
	session->result = next;
}

/*
 * Collect reads all results of a question, and keeps one.  Returns false if
 * the connection is lost.
 */
static bool
Collect(Session *session)
{
	PGresult *next;

	do
	{
		while (PQisBusy(session->conn))
		{
			if (!WaitReadable(session))
				return false;
			if (!PQconsumeInput(session->conn))
				break;
		}
		next = PQgetResult(session->conn);
		if (next != NULL)
			Keep(session, next);
	} while (next != NULL);
	return PQstatus(session->conn) == CONNECTION_OK;
}

/*
 * MayMeet tells whether the present attempt may meet an error that nothing in
 * its question provokes.
 */
static bool
MayMeet(const Session *session)
{
	const char *state = session->state;

	if (strcmp(state, "57014") == 0)
		return session->mayCancel;
	if (strcmp(state, "55P03") == 0)
		return session->mayTimeOut;
	if (strcmp(state, "40001") == 0)
		return session->maySerialize;
	return strcmp(state, "IK409") == 0 || strcmp(state, "40P01") == 0;
}

/*
 * Judge counts the error in the session's result, if it is one, and reports it
 * if it was not to be expected.  "expected" names the SQLSTATEs that the
 * question itself provokes, or is NULL.
 */
static void
Judge(Session *session, const char *expected, const char *sql)
{
	ExecStatusType status = PQresultStatus(session->result);
	const char *state;

	if (status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK)
		return;
	state = PQresultErrorField(session->result, PG_DIAG_SQLSTATE);
	snprintf(session->state, sizeof(session->state), "%s", state ? state : "XX000");
	CountError(session->state);
	if (!(expected != NULL && strstr(expected, session->state) != NULL) && !MayMeet(session))
		Violation(
			"[errors] unexpected error: %s  in: %.400s",
			PQresultVerboseErrorMessage(session->result, PQERRORS_VERBOSE, PQSHOW_CONTEXT_NEVER),
			sql);
}

/*
 * Ask sends SQL and waits for the last of its results that has rows.  Returns
 * whether all of it succeeded; otherwise session->state says why, and the error
 * has been counted.  "expected" names the SQLSTATEs that it provokes, or is
 * NULL.
 */
bool
Ask(Session *session, const char *expected, const char *format, ...)
{
	va_list arguments;
	char *sql;
	int sent;

	PQclear(session->result);
	session->result = NULL;
	if (session->lost)
		return false;
	session->state[0] = '\0';

	va_start(arguments, format);
	(void) !vasprintf(&sql, format, arguments);
	va_end(arguments);

	sent = session->extended ? PQsendQueryParams(session->conn, sql, 0, NULL, NULL, NULL, NULL, 0)
							 : PQsendQuery(session->conn, sql);
	if (sent && Collect(session))
		Judge(session, expected, sql);
	else if (!session->lost)
	{
		Count(TALLY_TERMINATED);
		Lose(session);
	}
	free(sql);
	return session->state[0] == '\0';
}

/*
 * Value returns a field of the last result, NULL for NULL.
 */
const char *
Value(Session *session, int row, int column)
{
	return PQgetisnull(session->result, row, column) ? NULL
													 : PQgetvalue(session->result, row, column);
}

/*
 * Field returns the field of that name of the last result, NULL for NULL.
 */
const char *
Field(Session *session, int row, const char *name)
{
	int column = PQfnumber(session->result, name);

	if (column < 0)
	{
		fprintf(stderr, "stress: the result has no column %s\n", name);
		exit(2);
	}
	return Value(session, row, column);
}

/* ----------------------------------------------------------------
 * Beginning and ending an attempt
 * ----------------------------------------------------------------
 */

/*
 * SessionLight lights the fuse.
 */
void
SessionLight(Session *session, Fuse fuse, int microseconds)
{
	session->fuse = fuse;
	session->fuseEnd = Microseconds() + microseconds;
	session->mayCancel |= fuse == FUSE_CANCEL;
}

/*
 * SessionSettle ends whatever the last attempt left: a lost connection, an
 * open transaction, timeouts, a cancel that comes late.
 */
void
SessionSettle(Session *session)
{
	session->fuse = FUSE_NONE;
	session->extended = false;
	while (!session->lost && PQtransactionStatus(session->conn) != PQTRANS_IDLE)
		(void) Ask(session, NULL, "ROLLBACK");
	if (session->cancelled)
		(void) Ask(session, NULL, "SELECT 'a late cancel ends here'");
	while (!session->lost && session->mayTimeOut &&
		   !Ask(session, NULL, "RESET statement_timeout; RESET lock_timeout"))
		;
	if (session->lost)
	{
		Disconnect(session);
		Connect(session);
	}
	session->cancelled = false;
	session->mayCancel = false;
	session->mayTimeOut = false;
	session->maySerialize = false;
}

/*
 * AwaitQuiet waits until no other client is connected: those whose connection
 * was dropped may be at work still.
 */
void
AwaitQuiet(Session *session)
{
	int64_t end = Microseconds() + (int64_t) SECONDS_TO_LEAVE * 1000000;

	while (Ask(session, NULL,
			   "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
			   "AND backend_type = 'client backend' AND pid <> pg_backend_pid()") &&
		   strcmp(Value(session, 0, 0), "0") != 0)
	{
		if (Microseconds() > end)
		{
			Violation("[hang] sessions of dropped connections do not end");
			return;
		}
		SleepMicroseconds(10000);
	}
}
