/*-------------------------------------------------------------------------
 *
 * settings/setting.h
 *	  A setting that clients carry, and whether its value can be used.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_SETTING_H
#define IDEMPOTENCY_SETTINGS_SETTING_H

#include "fmgr.h"
#include "utils/guc.h"

#include "settings/timing.h"

typedef enum SettingState
{
	SETTING_VALID,
	SETTING_INVALID, /* stored before the library could refuse it */
	SETTING_DENIED	 /* dropped: the session had no right to set it */
} SettingState;

/* What a check hook passes to its assign hook. */
typedef struct SettingValue
{
	bool valid;
	bool specific; /* set for a session, a function or a role: it precedes configure() */
	Retention duration;
	int number; /* the duration in the setting's unit, rounded up; or a size in bytes */
} SettingValue;

typedef struct Setting Setting;
struct Setting
{
	const char *name;

	/* Fills "value" from a text, and returns whether it is allowed; if not, sets the check's
	 * detail. */
	bool (*parse)(const Setting *setting, const char *text, SettingValue *value);

	/* Of a duration or size. */
	int unit; /* of a number without one: GUC_UNIT_S, GUC_UNIT_MS or GUC_UNIT_BYTE */
	int least;
	int most;
	bool forever; /* -1 is allowed */
	int fallback; /* the number while the value is invalid or denied */

	char *text; /* as it was set; never NULL once it is defined */
	SettingValue value;
	SettingState state;
	bool hidden; /* the value of the login: the session or a leader may have another */
};

extern bool ParseDuration(const Setting *setting, const char *text, SettingValue *value);
extern bool ParseSize(const Setting *setting, const char *text, SettingValue *value);

extern bool SettingCheck(const Setting *setting, const char *text, void **extra, GucSource source);
extern void SettingAssign(Setting *setting, const void *extra);
extern void SettingDefine(Setting *setting, const char *description, const char *more,
						  const char *boot, GucContext context, GucStringCheckHook check,
						  GucStringAssignHook assign);

/* The value that applies to a scope, or to the database if it is NULL. */
extern void RequireSetting(const Setting *setting, const text *scope);
extern Retention SettingRetention(const Setting *setting, const text *scope);
extern int SettingNumber(const Setting *setting, const text *scope);
extern const char *SettingText(const Setting *setting, const text *scope);

#endif /* IDEMPOTENCY_SETTINGS_SETTING_H */
