/*-------------------------------------------------------------------------
 *
 * base/scope_prefix.h
 *	  Enforcing idempotency.scope_prefix.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_SCOPE_PREFIX_H
#define IDEMPOTENCY_BASE_SCOPE_PREFIX_H

extern void CheckScopePrefix(const text *scope);

#endif /* IDEMPOTENCY_BASE_SCOPE_PREFIX_H */
