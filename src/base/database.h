/*-------------------------------------------------------------------------
 *
 * base/database.h
 *	  Whether background workers can be started for a database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_DATABASE_H
#define IDEMPOTENCY_BASE_DATABASE_H

#include "catalog/pg_database.h"

extern bool DatabaseMayBeVisited(Form_pg_database form);
extern bool DatabaseProbe(Oid database);

#endif /* IDEMPOTENCY_BASE_DATABASE_H */
