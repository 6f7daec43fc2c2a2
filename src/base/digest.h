/*-------------------------------------------------------------------------
 *
 * base/digest.h
 *	  SHA-256.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_DIGEST_H
#define IDEMPOTENCY_BASE_DIGEST_H

#include "common/sha2.h"

extern void DigestCompute(const void *data, size_t length, uint8 *digest);

#endif /* IDEMPOTENCY_BASE_DIGEST_H */
