/*-------------------------------------------------------------------------
 *
 * check.h
 *	  Compares keys, effects and responses.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_CHECK_H
#define STRESS_CHECK_H

#include <stdbool.h>

#include "session.h"

/* What the tables contain about one operation. */
typedef struct Truth
{
	bool stored;
	bool failed;
	char *answer;	 /* as peek() returns it */
	int effects;	 /* due is one, or none of a failure */
	int64_t attempt; /* of the last effect: what made it; likewise below */
	int amount;

	/* of leases */
	int64_t paid; /* the charge that paid it */
	int charges;  /* the effects at the provider */
	int64_t charge;
	int charged; /* the amount */
	bool declined;
	bool derived; /* under the key derived from the operation */
} Truth;

/* check.c: of both workloads */
extern void Expect(Session *session, const char *what, const char *expected, const char *sql);
extern void ReadRecords(Session *session, Truth *truths);
extern void ReadEffects(Session *session, Truth *truths, const char *table);
extern bool CheckEffect(int key, const Truth *truth);
extern void CheckServer(Session *session);

/* check_retries.c, check_leases.c */
extern void CheckRetries(Session *session, bool complete);
extern void CheckLeases(Session *session);

#endif /* STRESS_CHECK_H */
