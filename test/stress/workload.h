/*-------------------------------------------------------------------------
 *
 * workload.h
 *	  The workloads of the stress test.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_WORKLOAD_H
#define STRESS_WORKLOAD_H

#include "session.h"

typedef struct Workload
{
	const char *name;

	/* Runs with fewer operations or clients need not reach all minimums of the counters. */
	int fullOperations;
	int fullClients;

	int clients;	/* unless CLIENTS= says */
	int operations; /* unless OPERATIONS= says */

	void (*prepare)(Session *session); /* before the first client connects */
	void (*run)(Session *session); /* until the last client has ended */
	void (*check)(Session *session); /* when no client is connected any more */
} Workload;

extern const Workload retriesWorkload;
extern const Workload leasesWorkload;

#endif /* STRESS_WORKLOAD_H */
