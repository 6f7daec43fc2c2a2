/*-------------------------------------------------------------------------
 *
 * server.h
 *	  What must hold in the server when the clients are gone.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_SERVER_H
#define STRESS_SERVER_H

#include "session.h"

extern void Expect(Session *session, const char *what, const char *expected, const char *sql);
extern void CheckIndexes(Session *session);

#endif /* STRESS_SERVER_H */
