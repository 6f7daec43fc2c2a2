/*-------------------------------------------------------------------------
 *
 * relayregistryinternal.h
 *	  What the rooms of the registry share: relayregistry.c, relayturn.c and
 *	  relayserved.c, the only ones that touch it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYREGISTRYINTERNAL_H
#define IDEMPOTENCY_RELAYREGISTRYINTERNAL_H

#include "relayregistry.h"
#include "shmem.h"

typedef enum RelayState
{
	RELAY_STATE_IDLE,
	RELAY_STATE_STARTING,
	RELAY_STATE_SERVED
} RelayState;

/* The longest time for which a subscription is put off, in milliseconds. */
#define PUT_OFF_MOST_MS 30000

/* No handler has seen the batch that is out, whichever it is. */
#define UNTOUCHED_ANY (-1)

/* relayregistry.c */
extern void RegistryLock(void);
extern RelaySubscription *RegistryLockTask(const RelayTask *task);
extern void RegistryUnlock(void);
extern void RegistryWakeLauncher(void);
extern void RegistryGiveUp(RelaySubscription *it);

/* relayturn.c */
extern bool RegistryTakeNext(int workers, RelayState state, const RelayTask *like, RelayTask *task);

#endif /* IDEMPOTENCY_RELAYREGISTRYINTERNAL_H */
