/*-------------------------------------------------------------------------
 *
 * settings/scope_prefix.h
 *	  Scope and key as the arguments of a call, held to the prefix of the login role.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_SCOPE_PREFIX_H
#define IDEMPOTENCY_SETTINGS_SCOPE_PREFIX_H

#include "base/name.h"
#include "base/pattern.h"

extern const char *ScopePrefix(void);
extern void CheckScopePrefix(const text *start, const text *scope);
extern text *ScopeFromArg(FunctionCallInfo fcinfo);
extern void KeyNameFromArgs(FunctionCallInfo fcinfo, KeyName *name);
extern void ScopePatternFromArg(FunctionCallInfo fcinfo, ScopePattern *scopes);

#endif /* IDEMPOTENCY_SETTINGS_SCOPE_PREFIX_H */
