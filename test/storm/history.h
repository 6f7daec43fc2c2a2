/*-------------------------------------------------------------------------
 *
 * history.h
 *	  What happened to each operation, step by step.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_HISTORY_H
#define STORM_HISTORY_H

#include "session.h"

/* Who finished each operation; 0 for nobody. */
extern int64_t *HistoryCheck(Session *session);

#endif /* STORM_HISTORY_H */
