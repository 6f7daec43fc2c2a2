/*-------------------------------------------------------------------------
 *
 * check.h
 *	  Compares keys, orders, charges and responses.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_CHECK_H
#define STORM_CHECK_H

#include "session.h"

extern void Check(Session *session);
extern void CheckServer(Session *session);

#endif /* STORM_CHECK_H */
