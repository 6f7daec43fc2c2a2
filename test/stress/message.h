/*-------------------------------------------------------------------------
 *
 * message.h
 *	  Attempts that consume messages of an inbox with once() and once_many().
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_MESSAGE_H
#define STRESS_MESSAGE_H

#include "attempt.h"

extern void AttemptInboxTransaction(Attempt *attempt);
extern void AttemptDeliver(Attempt *attempt);
extern void AttemptDeliverMany(Attempt *attempt);

#endif /* STRESS_MESSAGE_H */
