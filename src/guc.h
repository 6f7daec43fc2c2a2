/*-------------------------------------------------------------------------
 *
 * guc.h
 *	  The settings, as their consumers read them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_GUC_H
#define IDEMPOTENCY_GUC_H

extern int DefaultRetention; /* seconds; -1 = for ever */
extern int DefaultWait;		 /* milliseconds */
extern int MaxResponseSize;	 /* bytes */
extern char *ScopePrefix;	 /* never NULL; empty = none */

extern bool IsFinalError(int sqlstate);
extern void DefineSettings(void);

#endif /* IDEMPOTENCY_GUC_H */
