/*-------------------------------------------------------------------------
 *
 * janitor.h
 *	  An administrator at work on the key store, meanwhile.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_JANITOR_H
#define STRESS_JANITOR_H

extern void *JanitorMain(void *argument);
extern void JanitorStop(void);

#endif /* STRESS_JANITOR_H */
