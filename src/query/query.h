/*-------------------------------------------------------------------------
 *
 * query/query.h
 *	  SQL of the extension, run as the owner of its tables.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_QUERY_QUERY_H
#define IDEMPOTENCY_QUERY_QUERY_H

#include "executor/spi.h"

#define EXTENSION_QUERY_PARAMETERS 20
#define EXTENSION_QUERY_RESULTS 15

/* Operators that do not depend on the search path. */
#define EQ " OPERATOR(pg_catalog.=) "
#define LT " OPERATOR(pg_catalog.<) "
#define LE " OPERATOR(pg_catalog.<=) "
#define GE " OPERATOR(pg_catalog.>=) "
#define GT " OPERATOR(pg_catalog.>) "
#define PLUS " OPERATOR(pg_catalog.+) "

/* A query and its plan; must be a static variable. */
typedef struct ExtensionQuery
{
	const char *table; /* its owner runs the query */
	const char *text;
	int parameters;
	Oid types[EXTENSION_QUERY_PARAMETERS];
	Oid results[EXTENSION_QUERY_RESULTS]; /* of the columns that are read */
	bool checksCaller; /* it calls a function that checks the role of the session */
	SPIPlanPtr plan;
} ExtensionQuery;

extern uint64 ExtensionQueryRun(ExtensionQuery *query, Datum *values, const bool *isnull);
extern uint64 ExtensionQueryDo(ExtensionQuery *query, Datum *values, const bool *isnull);
extern Datum ExtensionQueryValue(const ExtensionQuery *query, uint64 row, int column, bool *isnull);
extern void ExtensionQueryEnd(void);

#endif /* IDEMPOTENCY_QUERY_QUERY_H */
