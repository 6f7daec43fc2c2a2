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
#define OWNER_QUERY_RESULTS 15

/* Qualified operators: the queries have to read the same under any search path. */
#define EQ " OPERATOR(pg_catalog.=) "
#define LT " OPERATOR(pg_catalog.<) "
#define LE " OPERATOR(pg_catalog.<=) "
#define GE " OPERATOR(pg_catalog.>=) "
#define GT " OPERATOR(pg_catalog.>) "
#define PLUS " OPERATOR(pg_catalog.+) "

/* A query, with its plan once it was made; to be kept in a static variable. */
typedef struct OwnerQuery
{
	const char *table; /* whose owner runs it */
	const char *text;
	int parameters;
	Oid types[OWNER_QUERY_PARAMETERS];
	Oid results[OWNER_QUERY_RESULTS]; /* of what is read of its result */
	SPIPlanPtr plan;
} OwnerQuery;

extern uint64 OwnerQueryRun(OwnerQuery *query, Datum *values, const bool *isnull);
extern uint64 OwnerQueryDo(OwnerQuery *query, Datum *values, const bool *isnull);
extern Datum OwnerQueryValue(const OwnerQuery *query, uint64 row, int column, bool *isnull);
extern void OwnerQueryEnd(void);

#endif /* IDEMPOTENCY_OWNERQUERY_H */
