/*-------------------------------------------------------------------------
 *
 * session.h
 *	  A client's connection, with network faults.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_SESSION_H
#define STRESS_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <libpq-fe.h>

/* The fault of a session when its timer ends. */
typedef enum NetworkFault
{
	NETWORK_NONE,
	NETWORK_CANCEL, /* a cancel request is sent, once */
	NETWORK_DROP	/* the connection is dropped, and no reply is read */
} NetworkFault;

typedef struct Session
{
	const char *name;
	PGconn *conn;
	PGcancel *cancel;
	atomic_int pid; /* of the backend, for others to terminate */
	bool lost;

	NetworkFault networkFault;
	int64_t faultTime;
	bool cancelled;

	/* Errors that the present attempt can meet, and others cannot. */
	bool mayCancel;
	bool mayTimeOut;
	bool maySerialize;

	bool extended;	  /* use the extended protocol */
	PGresult *result; /* of the last query, or NULL */
	char state[6];	  /* its SQLSTATE, "" for success */
} Session;

extern int serverPatience;

extern void SessionOpen(Session *session, const char *name);
extern void SessionClose(Session *session);
extern void SessionSettle(Session *session);
extern void SessionSetFault(Session *session, NetworkFault networkFault, int microseconds);
extern void SessionDrop(Session *session);
extern void AwaitQuiet(Session *session);

extern bool Ask(Session *session, const char *expected, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
extern const char *Value(Session *session, int row, int column);
extern const char *Field(Session *session, int row, const char *name);
extern int64_t Microseconds(void);
extern void SleepMicroseconds(int64_t microseconds);

#endif /* STRESS_SESSION_H */
