/*-------------------------------------------------------------------------
 *
 * launcher/relays.h
 *	  Starting the relay's workers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_RELAYS_H
#define IDEMPOTENCY_LAUNCHER_RELAYS_H

extern long RelaysRun(void);

#endif /* IDEMPOTENCY_LAUNCHER_RELAYS_H */
