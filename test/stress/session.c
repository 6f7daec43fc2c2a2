/*-------------------------------------------------------------------------
 *
 * session.c
 *	  A client's connection, with network faults.
 *
 * All other files use a connection only through Ask(). Every error is counted or is a
 * violation: each attempt names the errors that it can meet. In particular, a cancel
 * without a request is a violation.
 *
 * A session belongs to one thread; others read only its pid.
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

/* No query of this test takes nearly as long: the server hangs. */
#define HANG_SECONDS 120

/* Time limit for the sessions of dropped connections to exit. */
#define SECONDS_TO_LEAVE 60

/*
 * Deadlocks must be detected quickly. Logging the errors that the test provokes would
 * be slow.
 */
#define OPTIONS                                                                                    \
	"-c deadlock_timeout=5ms -c log_min_messages=fatal -c log_min_error_statement=fatal "          \
	"-c client_min_messages=error"

/* Time limit for a restart of the server; 0: the server must be running. */
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
 * Ignore discards the server's notices, such as that it is terminating a connection.
 */
static void
Ignore(void *argument, const PGresult *notice)
{
	(void) argument;
	(void) notice;
}

/*
 * Connect connects, and waits for a server that is restarting.
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
 * SessionOpen connects to the server that the environment names. Exits with 2 if it
 * cannot.
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
 * Queries
 * ----------------------------------------------------------------
 */

/*
 * Lose records that the connection is lost; Settle opens another.
 */
static void
Lose(Session *session)
{
	session->lost = true;
	strcpy(session->state, "08006");
}

/*
 * SessionDrop drops the connection as a broken network does: it sends nothing to the
 * server, and does not read the data already sent.
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

	session->networkFault = NETWORK_NONE;
	session->cancelled = true;
	if (PQcancel(session->cancel, error, sizeof(error)))
		Count(TALLY_CANCELS);
}

/*
 * Hang prints what all sessions wait for, and ends the run.
 */
static void
Hang(Session *session)
{
	Session other;
	PGresult *all;

	Violation("[hang] no reply for %d seconds from backend %d", HANG_SECONDS, session->pid);
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
 * WaitReadable waits until the server has sent data, and applies the fault if its timer
 * ends first. Returns false if the connection is lost.
 */
static bool
WaitReadable(Session *session)
{
	int64_t hung = Microseconds() + (int64_t) HANG_SECONDS * 1000000;

	for (;;)
	{
		struct pollfd socket = {.fd = PQsocket(session->conn), .events = POLLIN};
		int64_t now = Microseconds();
		int64_t end = session->networkFault == NETWORK_NONE ? hung : session->faultTime;
		struct timespec left = {0, 0};
		int ready;

		if (end > now)
			left = (struct timespec){(end - now) / 1000000, (end - now) % 1000000 * 1000};
		ready = ppoll(&socket, 1, &left, NULL);
		if (ready > 0 || (ready < 0 && errno != EINTR))
			return true;
		if (ready < 0)
			continue;

		if (session->networkFault == NETWORK_CANCEL)
			SendCancel(session);
		else if (session->networkFault == NETWORK_DROP)
		{
			SessionDrop(session);
			return false;
		}
		else
			Hang(session);
	}
}

/*
 * Keep makes "next" the session's result if it is more informative than the present
 * one: an error is the most informative, and rows are more than none.
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
 * Collect reads all results of a query, and keeps one. Returns false if the connection
 * is lost.
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
 * MayMeet returns whether the present attempt can meet an error that its query does not
 * provoke.
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
 * CheckState counts the error in the session's result, if there is one, and reports an
 * unexpected error. "expected" names the SQLSTATEs that the query provokes, or is NULL.
 */
static void
CheckState(Session *session, const char *expected, const char *sql)
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
 * Ask sends SQL and waits for the last of its results that has rows. Returns whether
 * all of it succeeded; otherwise session->state is the error, which has been counted.
 * "expected" names the SQLSTATEs that the query provokes, or is NULL.
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
		CheckState(session, expected, sql);
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
 * Start and end of an attempt
 * ----------------------------------------------------------------
 */

/*
 * SessionSetFault starts the timer of the fault.
 */
void
SessionSetFault(Session *session, NetworkFault networkFault, int microseconds)
{
	session->networkFault = networkFault;
	session->faultTime = Microseconds() + microseconds;
	session->mayCancel |= networkFault == NETWORK_CANCEL;
}

/*
 * SessionSettle resets the session after the last attempt: a lost connection, an open
 * transaction, timeouts, a late cancel.
 */
void
SessionSettle(Session *session)
{
	session->networkFault = NETWORK_NONE;
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
 * AwaitQuiet waits until no other client is connected: sessions of dropped connections
 * can still be active.
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
