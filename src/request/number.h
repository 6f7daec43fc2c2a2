/*-------------------------------------------------------------------------
 *
 * request/number.h
 *	  The canonical text of a number.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_NUMBER_H
#define IDEMPOTENCY_REQUEST_NUMBER_H

#include "lib/stringinfo.h"
#include "utils/numeric.h"

extern void NumberAppend(StringInfo out, Numeric number);

#endif /* IDEMPOTENCY_REQUEST_NUMBER_H */
