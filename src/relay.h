/*-------------------------------------------------------------------------
 *
 * relay.h
 *	  The worker that gives the events of a subscription to its handler.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_H
#define IDEMPOTENCY_RELAY_H

#include "fmgr.h"

/* The background worker that the relay launcher starts for one subscription. */
extern PGDLLEXPORT void idempotency_relay_main(Datum unused);

#endif /* IDEMPOTENCY_RELAY_H */
