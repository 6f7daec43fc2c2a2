/*-------------------------------------------------------------------------
 *
 * trouble.h
 *	  Faults of the workers, and the reaper.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_TROUBLE_H
#define STRESS_TROUBLE_H

#include "session.h"

extern void MarkAlive(Session *session);
extern void *FaultMain(void *argument);
extern void *ReaperMain(void *argument);

#endif /* STRESS_TROUBLE_H */
