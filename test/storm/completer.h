/*-------------------------------------------------------------------------
 *
 * completer.h
 *	  Completers: they take over what nobody came back for.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_COMPLETER_H
#define STORM_COMPLETER_H

extern void *CompleterMain(void *argument);

#endif /* STORM_COMPLETER_H */
