/*-------------------------------------------------------------------------
 *
 * base/guc.h
 *	  The settings and their values.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_GUC_H
#define IDEMPOTENCY_BASE_GUC_H

#include "base/setting.h"

/*
 * Call RequireSetting() where one of these is needed.  The value of the prefix is its
 * text, empty for none.
 */
extern Setting RetentionSetting;
extern Setting ResponseSizeSetting;
extern Setting PayloadSizeSetting;
extern Setting PrefixSetting;
extern Setting FinalErrorsSetting;

extern Retention DefaultRetention;
extern int DefaultWait;		/* milliseconds */
extern int MaxResponseSize; /* bytes; 0 if it is invalid */
extern int MaxPayloadSize;	/* the same */

extern int OutboxRetention;	  /* seconds; 0: none, -1: forever */
extern int ReaperNaptime;	  /* milliseconds; 0: nothing is reaped */
extern char *ReaperDatabases; /* a list of names; empty: all */

extern int RelayWorkers;   /* at the same time; 0: none */
extern int HandlerTimeout; /* milliseconds; 0: none */

extern bool IsFinalError(int sqlstate);
extern const char *DocumentationUri(void);
extern void DefineSettings(void);

#endif /* IDEMPOTENCY_BASE_GUC_H */
