/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  One worker: an attempt at one operation, and what becomes of it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_WORKER_H
#define STORM_WORKER_H

#include "plan.h"
#include "session.h"

#define SCOPE "storm/charge"
#define MOST_RECONNECTS 4 /* of one worker */

/* Where a worker stands; its fate overtakes it at one of them. */
typedef enum Phase
{
	PHASE_CLAIMED,
	PHASE_PREPARED, /* the first checkpoint */
	PHASE_CHARGED,	/* the provider has charged, and nothing here says so */
	PHASE_NOTED,	/* the second checkpoint says so */
	PHASE_WRITTEN,	/* in the last transaction, not yet finished */
	PHASE_FINISHED, /* in the last transaction, not yet committed */
	PHASE_COUNT
} Phase;

typedef enum Fate
{
	FATE_LIVE,
	FATE_DIE,		/* is never heard of again */
	FATE_TERMINATE, /* its backend is terminated */
	FATE_STALL,		/* sleeps past its lease, and goes on */
	FATE_RELEASE	/* gives up, and says so */
} Fate;

/* The two connections of a thread. */
typedef struct Seat
{
	Session session;
	Session provider;
} Seat;

typedef struct Worker
{
	Session *session;
	Session *provider;
	Random random;
	int64_t number;
	int key;
	char name[KEY_TEXT];

	/* What it is like. */
	bool calm;
	Fate fate;
	Phase when;
	bool diligent;	 /* renews its lease between the phases */
	bool persistent; /* reconnects, and goes on */
	int reconnects;	 /* so far */
	int leaseMs;

	/* What it has been granted, and how far it has come. */
	bool leased;
	int64_t token;
	int64_t leaseEnd; /* when it will have run out, on this side's clock */
	char derived[40]; /* the key for the provider */
	char point[32];	  /* the last checkpoint, "" for none */
	char charge[32];  /* the provider's number */
	bool declined;
	bool inTransaction;
	bool dead;
	bool fenced;   /* its token was refused */
	bool answered; /* the client has its answer */
} Worker;

extern void WorkerMake(Worker *worker, Seat *seat, int64_t number, int key, bool calm);
extern void Grant(Worker *worker, int row);
extern bool WorkerAlive(Worker *worker, Phase phase);
extern bool Recover(Worker *worker);
extern bool Fenced(Worker *worker);
extern bool Renew(Worker *worker);
extern bool Checkpoint(Worker *worker, const char *point, const char *state);

#endif /* STORM_WORKER_H */
