/*-------------------------------------------------------------------------
 *
 * relaysurvey.h
 *	  Finding the subscriptions of a database that have a handler.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYSURVEY_H
#define IDEMPOTENCY_RELAYSURVEY_H

#include "reaperrun.h"

extern RunState RelaySurvey(void);

#endif /* IDEMPOTENCY_RELAYSURVEY_H */
