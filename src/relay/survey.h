/*-------------------------------------------------------------------------
 *
 * relay/survey.h
 *	  Finding the subscriptions of a database that have a handler.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_SURVEY_H
#define IDEMPOTENCY_RELAY_SURVEY_H

#include "base/bgworker.h"

extern RunState RelaySurvey(void);

#endif /* IDEMPOTENCY_RELAY_SURVEY_H */
