/*-------------------------------------------------------------------------
 *
 * storm.h
 *	  Declarations that all threads share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_STORM_H
#define STORM_STORM_H

#include "worker.h"

/* Slots of the clients come first, then those of the completers. */
extern Slot *slots;
extern int slotCount;

extern bool StormIsOver(void);
extern double StormProgress(void);

#endif /* STORM_STORM_H */
