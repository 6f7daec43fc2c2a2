/*-------------------------------------------------------------------------
 *
 * settings/guc.h
 *	  The settings and their values.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_GUC_H
#define IDEMPOTENCY_SETTINGS_GUC_H

#include "settings/setting.h"

extern Setting RetentionSetting;
extern Setting WaitSetting;			   /* milliseconds */
extern Setting ResponseSizeSetting;	   /* bytes; 0 if it is invalid */
extern Setting PayloadSizeSetting;	   /* the same */
extern Setting OutboxRetentionSetting; /* seconds; 0: none, -1: forever, also if it is invalid */
extern Setting HandlerTimeoutSetting;  /* milliseconds; 0: none */
extern Setting PrefixSetting;		   /* its text is empty for none */
extern Setting FinalErrorsSetting;

extern int ReaperNaptime;	  /* milliseconds; 0: nothing is reaped */
extern char *ReaperDatabases; /* a list of names; empty: all */

extern int RelayWorkers; /* at the same time; 0: none */

extern bool IsFinalError(int sqlstate);
extern const char *DocumentationUri(void);
extern Setting *ConfigurableSetting(const char *name);
extern void DefineSettings(void);

#endif /* IDEMPOTENCY_SETTINGS_GUC_H */
