/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  One worker: an attempt at one operation, with its faults.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_WORKER_H
#define STRESS_WORKER_H

#include "plan.h"
#include "session.h"

#define SCOPE "stress/lease"
#define MOST_RECONNECTS 4 /* of one worker */

/* The phases of a worker; its fault occurs at one of them. */
typedef enum Phase
{
	PHASE_CLAIMED,
	PHASE_PREPARED, /* the first checkpoint */
	PHASE_CHARGED,	/* the provider has charged, not yet stored */
	PHASE_NOTED,	/* the second checkpoint is stored */
	PHASE_WRITTEN,	/* in the last transaction, not yet finished */
	PHASE_FINISHED, /* in the last transaction, not yet committed */
	PHASE_COUNT
} Phase;

typedef enum Fault
{
	FAULT_LIVE,
	FAULT_DIE,		 /* stops without notice */
	FAULT_TERMINATE, /* its backend is terminated */
	FAULT_STALL,	 /* sleeps past its lease and continues */
	FAULT_RELEASE	 /* releases its lease */
} Fault;

/* The two connections of a thread. */
typedef struct Slot
{
	Session session;
	Session provider;
} Slot;

typedef struct Worker
{
	Session *session;
	Session *provider;
	Random random;
	int64_t number;
	int key;
	char name[KEY_TEXT];

	/* Its behaviour. */
	bool reliable;
	Fault fault;
	Phase when;
	bool diligent;	 /* renews its lease between the phases */
	bool persistent; /* reconnects and continues */
	int reconnects;	 /* so far */
	int leaseMs;

	/* What it was granted, and its progress. */
	bool leased;
	int64_t token;
	int64_t leaseEnd; /* when it expires, by the clock of this process */
	char derived[40]; /* the key for the provider */
	char point[32];	  /* the last checkpoint, "" for none */
	char charge[32];  /* the provider's number */
	bool declined;
	bool inTransaction;
	bool dead;
	bool fenced;   /* its token was rejected */
	bool answered; /* the client has its response */
} Worker;

extern void WorkerMake(Worker *worker, Slot *slot, int64_t number, int key, bool reliable);
extern void WorkerGrant(Worker *worker, int row);
extern bool WorkerAlive(Worker *worker, Phase phase);
extern bool Recover(Worker *worker);
extern bool Fenced(Worker *worker);
extern bool Renew(Worker *worker);
extern bool Checkpoint(Worker *worker, const char *point, const char *state);

#endif /* STRESS_WORKER_H */
