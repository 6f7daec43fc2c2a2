/*-------------------------------------------------------------------------
 *
 * request/keygen.h
 *	  Generating UUIDs.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_KEYGEN_H
#define IDEMPOTENCY_REQUEST_KEYGEN_H

#include "utils/uuid.h"

extern pg_uuid_t *NewUuidV7(void);

#endif /* IDEMPOTENCY_REQUEST_KEYGEN_H */
