/*-------------------------------------------------------------------------
 *
 * check.h
 *	  Compares keys, effects and responses.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_CHECK_H
#define STRESS_CHECK_H

#include <stdbool.h>

#include "session.h"

extern void Check(Session *session, bool complete);
extern void CheckServer(Session *session);

#endif /* STRESS_CHECK_H */
