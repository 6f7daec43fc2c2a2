/*-------------------------------------------------------------------------
 *
 * history.h
 *	  The history of each operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_HISTORY_H
#define STRESS_HISTORY_H

#include "session.h"

/* The worker that finished each operation; 0 for none. */
extern int64_t *HistoryCheck(Session *session);

#endif /* STRESS_HISTORY_H */
