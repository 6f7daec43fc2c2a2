/*-------------------------------------------------------------------------
 *
 * leases.h
 *	  Declarations that all threads share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_LEASES_H
#define STRESS_LEASES_H

#include "worker.h"

/* Slots of the clients come first, then those of the completers. */
extern Slot *slots;
extern int slotCount;

extern bool LeasesAreOver(void);
extern double LeasesProgress(void);

#endif /* STRESS_LEASES_H */
