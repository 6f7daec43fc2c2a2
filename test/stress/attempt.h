/*-------------------------------------------------------------------------
 *
 * attempt.h
 *	  One attempt of a client: its operations and its grants.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_ATTEMPT_H
#define STRESS_ATTEMPT_H

#include "plan.h"
#include "session.h"

#define MOST_KEYS 20 /* of one attempt */
#define LIST_TEXT (MOST_KEYS * (REQUEST_TEXT + 64))
#define DELAY_TEXT 16

/* A response that is valid once the transaction has committed. */
typedef struct Pending
{
	int key;
	char *answer; /* NULL: of once() */
} Pending;

typedef struct Attempt
{
	Session *session;
	Random random;
	int64_t number;
	bool plain;	  /* READ COMMITTED, so that no serialization failure can occur */
	bool patient; /* waits for each key, so that deadlocks occur */
	bool owner;	  /* has been granted a key, outside savepoints */

	Pending pending[MOST_KEYS];
	int pendings;

	/* The error that a commit must fail with: IK428, IK412, or none. */
	const char *refusal;
} Attempt;

/* The result of a claim. */
typedef enum Grant
{
	GRANT_CLAIMED,
	GRANT_NOT,	/* replayed, in progress, mismatched, or seen before */
	GRANT_ERROR /* the transaction failed */
} Grant;

extern void AttemptMake(Attempt *attempt, Session *session, int64_t number);
extern void Endanger(Attempt *attempt);
extern bool Delay(Attempt *attempt);
extern void DelayText(Attempt *attempt, char text[DELAY_TEXT]);
extern bool Timeouts(Attempt *attempt, const char *local);
extern void Pend(Attempt *attempt, int key, char *answer);
extern void PendingHold(Attempt *attempt);
extern void PendingForget(Attempt *attempt);
extern void Frame(Attempt *attempt, const char **begin, const char **commit);
extern void Refused(Attempt *attempt, int key, bool acknowledged, bool tried);
extern Grant ReadGrant(Attempt *attempt, int key, bool acknowledged, bool another);
extern char *ResultAnswer(Session *session);
extern bool ReadOnce(Attempt *attempt, int key, bool acknowledged, bool isNew);

#endif /* STRESS_ATTEMPT_H */
