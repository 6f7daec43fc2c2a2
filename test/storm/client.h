/*-------------------------------------------------------------------------
 *
 * client.h
 *	  The first step of a client's worker: the claim.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_CLIENT_H
#define STORM_CLIENT_H

#include "worker.h"

extern void Attempt(Worker *worker);

#endif /* STORM_CLIENT_H */
