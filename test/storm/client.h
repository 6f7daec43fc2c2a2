/*-------------------------------------------------------------------------
 *
 * client.h
 *	  What a client's worker begins with: the claim.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_CLIENT_H
#define STORM_CLIENT_H

#include "worker.h"

extern void Attempt(Worker *worker);

#endif /* STORM_CLIENT_H */
