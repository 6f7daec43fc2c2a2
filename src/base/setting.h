/*-------------------------------------------------------------------------
 *
 * base/setting.h
 *	  A setting that clients carry, and whether its value can be used.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_SETTING_H
#define IDEMPOTENCY_BASE_SETTING_H

#include "utils/guc.h"

#include "base/timing.h"

typedef enum SettingState
{
	SETTING_VALID,
	SETTING_INVALID, /* stored before the library could refuse it */
	SETTING_DENIED	 /* dropped: the session had no right to set it */
} SettingState;

typedef struct Setting
{
	const char *name;

	/* Of a duration or size. */
	int unit; /* of a number without one: GUC_UNIT_S, GUC_UNIT_MS or GUC_UNIT_BYTE */
	int least;
	int most;
	bool forever; /* -1 is allowed */
	int *number;  /* is set to the value in that unit; or NULL */
	int fallback; /* the number while the value is invalid or denied */

	char *text; /* as it was set; never NULL once it is defined */
	SettingState state;
	bool hidden; /* the value of the login: the session or a leader may have another */
} Setting;

/* What a check hook passes to its assign hook. */
typedef struct SettingValue
{
	bool valid;
	Retention duration;
	int number; /* the duration in the setting's unit, rounded up; or a size in bytes */
} SettingValue;

/* Hooks of a duration or size, and parts of other hooks. */
extern bool SettingCheck(const Setting *setting, const char *text, void **extra, GucSource source);
extern const SettingValue *SettingAssign(Setting *setting, const void *extra);
extern bool SettingAccept(const Setting *setting, const char *text, void **extra, GucSource source,
						  const SettingValue *value);

extern void SettingDefine(Setting *setting, const char *description, const char *more,
						  const char *boot, GucContext context, GucStringCheckHook check,
						  GucStringAssignHook assign);
extern void RequireSetting(const Setting *setting);

#endif /* IDEMPOTENCY_BASE_SETTING_H */
