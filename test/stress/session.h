/*-------------------------------------------------------------------------
 *
 * session.h
 *	  A client's connection, and what the network does to it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_SESSION_H
#define STRESS_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <libpq-fe.h>

/* What happens to a session when its fuse has burnt down. */
typedef enum Fuse
{
	FUSE_NONE,
	FUSE_CANCEL, /* a cancel request is sent, once */
	FUSE_DROP	 /* the connection is gone, and no answer is read */
} Fuse;

typedef struct Session
{
	const char *name;
	PGconn *conn;
	PGcancel *cancel;
	atomic_int pid; /* of the backend, for others to terminate */
	bool lost;

	Fuse fuse;
	int64_t fuseEnd;
	bool cancelled;

	/* Errors that the present attempt may meet, and others may not. */
	bool mayCancel;
	bool mayTimeOut;
	bool maySerialize;

	bool extended;	  /* ask by the extended protocol */
	PGresult *result; /* of the last question, or NULL */
	char state[6];	  /* its SQLSTATE, "" for success */
} Session;

extern int serverPatience;

extern void SessionOpen(Session *session, const char *name);
extern void SessionClose(Session *session);
extern void SessionSettle(Session *session);
extern void SessionLight(Session *session, Fuse fuse, int microseconds);
extern void SessionDrop(Session *session);
extern void AwaitQuiet(Session *session);

extern bool Ask(Session *session, const char *expected, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
extern const char *Value(Session *session, int row, int column);
extern const char *Field(Session *session, int row, const char *name);
extern int64_t Microseconds(void);
extern void SleepMicroseconds(int64_t microseconds);

#endif /* STRESS_SESSION_H */
