/*-------------------------------------------------------------------------
 *
 * step.h
 *	  The steps of a transaction, but for those that ask for a key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_STEP_H
#define STRESS_STEP_H

#include "attempt.h"

/* What an owner means to do with its claim. */
typedef enum Fate
{
	FATE_SUCCEED,
	FATE_DECLINE, /* a business failure: store it */
	FATE_RELEASE, /* give the claim up */
	FATE_FORGET,  /* commit without an outcome: IK428 */
	FATE_TWICE	  /* complete twice: IK412 */
} Fate;

/* One operation of the transaction. */
typedef struct Part
{
	int key;
	char name[KEY_TEXT];
	Grant grant;
	Fate fate;
} Part;

extern void PartFill(Part *part, int key);
extern bool GivesUp(Attempt *attempt);
extern bool Begin(Attempt *attempt);
extern bool RollBackTo(Attempt *attempt, const char *savepoint);
extern bool Insert(Attempt *attempt, const Part *part, int amount, const char *expected);
extern bool Write(Attempt *attempt, const Part *part);
extern bool WriteAndFail(Attempt *attempt, const Part *part);
extern Grant WriteWithoutGrant(Attempt *attempt, const Part *part);
extern bool End(Attempt *attempt);

#endif /* STRESS_STEP_H */
