/*-------------------------------------------------------------------------
 *
 * launcher/database.h
 *	  Whether background workers can be started for a database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_DATABASE_H
#define IDEMPOTENCY_LAUNCHER_DATABASE_H

#include "catalog/pg_database.h"

extern bool DatabaseMayBeVisited(Form_pg_database form);
extern bool DatabaseProbe(Oid database);

#endif /* IDEMPOTENCY_LAUNCHER_DATABASE_H */
