/*-------------------------------------------------------------------------
 *
 * server.h
 *	  Checks of the server after all clients have ended.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_SERVER_H
#define STRESS_SERVER_H

#include "session.h"

extern void Expect(Session *session, const char *what, const char *expected, const char *sql);
extern void CheckIndexes(Session *session);

#endif /* STRESS_SERVER_H */
