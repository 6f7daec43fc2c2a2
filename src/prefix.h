/*-------------------------------------------------------------------------
 *
 * prefix.h
 *	  The scopes that the login role may name.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_PREFIX_H
#define IDEMPOTENCY_PREFIX_H

extern void CheckScopePrefix(const text *scope);

#endif /* IDEMPOTENCY_PREFIX_H */
