/*-------------------------------------------------------------------------
 *
 * completer.h
 *	  Completers: workers that take over abandoned operations.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_COMPLETER_H
#define STORM_COMPLETER_H

extern void *CompleterMain(void *argument);

#endif /* STORM_COMPLETER_H */
