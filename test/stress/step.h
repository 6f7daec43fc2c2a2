/*-------------------------------------------------------------------------
 *
 * step.h
 *	  The steps of a transaction, except claims.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_STEP_H
#define STRESS_STEP_H

#include "attempt.h"

/* How an owner ends its claim. */
typedef enum Ending
{
	END_SUCCEED,
	END_DECLINE, /* store a business failure */
	END_RELEASE, /* release the claim */
	END_FORGET,	 /* commit without an outcome: IK428 */
	END_TWICE	 /* complete twice: IK412 */
} Ending;

/* One operation of the transaction. */
typedef struct Part
{
	int key;
	char name[KEY_TEXT];
	Grant grant;
	Ending ending;
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
