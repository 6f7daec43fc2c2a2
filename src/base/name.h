/*-------------------------------------------------------------------------
 *
 * base/name.h
 *	  The name of an operation: a scope and a key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_NAME_H
#define IDEMPOTENCY_BASE_NAME_H

#include "fmgr.h"

#include "base/compat.h"

/* The longest scope or key, in characters. */
#define KEYNAME_MAX_CHARS 255

typedef struct KeyName
{
	text *scope;
	text *key;
	uint64 lockNumber; /* of KeyLockNumber(); 0: not computed yet */
} KeyName;

extern void RefuseObjectText(const text *value, const char *what);
extern void CheckName(const text *value, const char *what);
extern text *NameFromArg(FunctionCallInfo fcinfo, int arg, const char *what);
extern bool KeyNameEquals(const KeyName *a, const KeyName *b);
extern text *TextCopy(const text *t);
extern bool TextEquals(const text *a, const text *b);

#endif /* IDEMPOTENCY_BASE_NAME_H */
