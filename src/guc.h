/*-------------------------------------------------------------------------
 *
 * guc.h
 *	  The settings, as their consumers read them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_GUC_H
#define IDEMPOTENCY_GUC_H

#define PREFIX_SETTING "idempotency.scope_prefix"

extern int DefaultRetention; /* seconds; -1 = for ever */
extern int DefaultWait;		 /* milliseconds */
extern int MaxResponseSize;	 /* bytes */
extern char *ScopePrefix;	 /* never NULL; empty = none */

extern int OutboxRetention;	  /* seconds; 0 = at once, -1 = for ever */
extern int ReaperNaptime;	  /* milliseconds; 0 = no tours */
extern char *ReaperDatabases; /* a list of names; empty = all */

extern int RelayWorkers;   /* at once; 0 = none */
extern int HandlerTimeout; /* milliseconds; 0 = none */

/* Was another prefix refused when the library came in? */
extern bool ScopePrefixRejected;

extern bool IsFinalError(int sqlstate);
extern void DefineSettings(void);

#endif /* IDEMPOTENCY_GUC_H */
