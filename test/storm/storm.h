/*-------------------------------------------------------------------------
 *
 * storm.h
 *	  What the threads of the storm share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_STORM_H
#define STORM_STORM_H

#include "worker.h"

/* Seats of the clients come first, then those of the completers. */
extern Seat *seats;
extern int seatCount;

extern bool StormIsOver(void);
extern double StormProgress(void);

#endif /* STORM_STORM_H */
