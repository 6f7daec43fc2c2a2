/*-------------------------------------------------------------------------
 *
 * completer.h
 *	  Completers: workers that take over abandoned operations.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_COMPLETER_H
#define STRESS_COMPLETER_H

extern void *CompleterMain(void *argument);

#endif /* STRESS_COMPLETER_H */
