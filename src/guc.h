/*-------------------------------------------------------------------------
 *
 * guc.h
 *	  The settings, as their consumers read them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_GUC_H
#define IDEMPOTENCY_GUC_H

#include "setting.h"

#define PREFIX_SETTING "idempotency.scope_prefix"

/*
 * Those that protect: call RequireSetting() where the value is needed.  The text of
 * the prefix is its value, empty for none.
 */
extern Setting RetentionSetting;
extern Setting ResponseSizeSetting;
extern Setting PrefixSetting;
extern Setting FinalErrorsSetting;

extern Retention DefaultRetention;
extern int DefaultWait;		/* milliseconds */
extern int MaxResponseSize; /* bytes; 0 if it was refused */

extern int OutboxRetention;	  /* seconds; 0 = at once, -1 = for ever */
extern int ReaperNaptime;	  /* milliseconds; 0 = no tours */
extern char *ReaperDatabases; /* a list of names; empty = all */

extern int RelayWorkers;	   /* at once; 0 = none */
extern int RelaySubscriptions; /* with a handler, in all databases */
extern int HandlerTimeout;	   /* milliseconds; 0 = none */

extern bool IsFinalError(int sqlstate);
extern void DefineSettings(void);

#endif /* IDEMPOTENCY_GUC_H */
