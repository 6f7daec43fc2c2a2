/*-------------------------------------------------------------------------
 *
 * ownerquery.h
 *	  SQL of the extension's own, run as the owner of its tables.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OWNERQUERY_H
#define IDEMPOTENCY_OWNERQUERY_H

#include "executor/spi.h"

#define OWNER_QUERY_PARAMETERS 20

/* A query, with its plan once it was made; to be kept in a static variable. */
typedef struct OwnerQuery
{
	const char *table; /* whose owner runs it */
	const char *text;
	int parameters;
	Oid types[OWNER_QUERY_PARAMETERS];
	SPIPlanPtr plan;
} OwnerQuery;

extern uint64 OwnerQueryRun(OwnerQuery *query, Datum *values, const bool *isnull);
extern uint64 OwnerQueryDo(OwnerQuery *query, Datum *values, const bool *isnull);
extern Datum OwnerQueryValue(uint64 row, int column, bool *isnull);
extern void OwnerQueryEnd(void);

#endif /* IDEMPOTENCY_OWNERQUERY_H */
