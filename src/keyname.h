/*-------------------------------------------------------------------------
 *
 * keyname.h
 *	  The name of one logical operation: a scope and a key, checked.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYNAME_H
#define IDEMPOTENCY_KEYNAME_H

#include "fmgr.h"

#include "compat.h"

/* The longest scope or key, in characters. */
#define KEYNAME_MAX_CHARS 255

typedef struct KeyName
{
	text *scope;
	text *key;
	uint64 lock; /* KeyLockNumber(); 0: not computed yet */
} KeyName;

extern void KeyNameFromArgs(FunctionCallInfo fcinfo, int scopeArg, KeyName *name);
extern void KeyNameMake(text *scope, text *key, KeyName *name);
extern void KeyNameSet(text *scope, text *key, KeyName *name);
extern void CheckName(const text *value, const char *what);
extern text *NameFromArg(FunctionCallInfo fcinfo, int arg, const char *what);
extern text *ScopeFromArg(FunctionCallInfo fcinfo, int scopeArg);
extern void KeyNameCopy(const KeyName *from, KeyName *to);
extern bool KeyNameEquals(const KeyName *a, const KeyName *b);
extern text *TextCopy(const text *t);
extern bool TextEquals(const text *a, const text *b);

#endif /* IDEMPOTENCY_KEYNAME_H */
