/*-------------------------------------------------------------------------
 *
 * janitor.h
 *	  Concurrent maintenance of the key store.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_JANITOR_H
#define STRESS_JANITOR_H

extern void *JanitorMain(void *argument);
extern void JanitorStop(void);

#endif /* STRESS_JANITOR_H */
