/*-------------------------------------------------------------------------
 *
 * client.h
 *	  The first step of a client's worker: the claim.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_CLIENT_H
#define STRESS_CLIENT_H

#include "worker.h"

extern void ClientServe(Worker *worker);

#endif /* STRESS_CLIENT_H */
