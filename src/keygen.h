/*-------------------------------------------------------------------------
 *
 * keygen.h
 *	  Makes new UUIDs.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYGEN_H
#define IDEMPOTENCY_KEYGEN_H

#include "utils/uuid.h"

extern pg_uuid_t *NewUuidV7(void);

#endif /* IDEMPOTENCY_KEYGEN_H */
