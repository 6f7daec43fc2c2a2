/*-------------------------------------------------------------------------
 *
 * setting.h
 *	  A setting of clients: its value, and whether that can be used.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTING_H
#define IDEMPOTENCY_SETTING_H

#include "utils/guc.h"

#include "timing.h"

typedef enum SettingState
{
	SETTING_VALID,
	SETTING_INVALID, /* the server stored a value before the library could refuse it */
	SETTING_DENIED	 /* the server dropped a value that the session had no right to set */
} SettingState;

typedef struct Setting
{
	const char *name;
	char *text; /* as it was set; never NULL once it is defined */
	SettingState state;
} Setting;

/* What the check hook of a setting hands to its assign hook. */
typedef struct SettingValue
{
	bool valid;
	Retention duration;
	int number; /* the duration in the setting's unit, rounded up; or a size in bytes */
} SettingValue;

/* The durations that a setting accepts; the longest is INT_MAX units. */
typedef struct DurationRule
{
	int unit;	  /* GUC_UNIT_S or GUC_UNIT_MS, of a number without a unit */
	bool nonzero; /* at least one unit */
	bool forever; /* -1 is for ever */
} DurationRule;

extern bool SettingMayStay(const Setting *setting, const char *text, GucSource source);
extern bool SettingAccept(const Setting *setting, const char *text, void **extra, GucSource source,
						  const SettingValue *value);
extern bool ParseDuration(const char *text, const DurationRule *rule, SettingValue *value);
extern bool ParseSize(const char *text, int least, int most, SettingValue *value);

extern void SettingsLoading(bool loading);
extern void RequireSetting(const Setting *setting);

#endif /* IDEMPOTENCY_SETTING_H */
