/*-------------------------------------------------------------------------
 *
 * trouble.h
 *	  Faults of the workers, and the reaper.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_TROUBLE_H
#define STORM_TROUBLE_H

#include "session.h"

extern void MarkAlive(Session *session);
extern void *FaultMain(void *argument);
extern void *ReaperMain(void *argument);

#endif /* STORM_TROUBLE_H */
