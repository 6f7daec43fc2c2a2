/*-------------------------------------------------------------------------
 *
 * settings/configured.h
 *	  What idempotency.configure() has stored.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_CONFIGURED_H
#define IDEMPOTENCY_SETTINGS_CONFIGURED_H

#include "settings/setting.h"

/* A row of the table configuration; it is valid until the next lookup. */
typedef struct ConfiguredSetting
{
	const Setting *setting;
	text *pattern;
	int literals; /* characters besides "*"; 0: the database */
	char *text;
	SettingValue value;
} ConfiguredSetting;

extern const ConfiguredSetting *ConfiguredFind(const Setting *setting, const text *scope);

#endif /* IDEMPOTENCY_SETTINGS_CONFIGURED_H */
