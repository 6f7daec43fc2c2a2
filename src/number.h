/*-------------------------------------------------------------------------
 *
 * number.h
 *	  One text for one number.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_NUMBER_H
#define IDEMPOTENCY_NUMBER_H

#include "lib/stringinfo.h"
#include "utils/numeric.h"

extern void NumberAppend(StringInfo out, Numeric number);

#endif /* IDEMPOTENCY_NUMBER_H */
