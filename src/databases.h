/*-------------------------------------------------------------------------
 *
 * databases.h
 *	  What the launcher knows of each database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DATABASES_H
#define IDEMPOTENCY_DATABASES_H

#include "nodes/pg_list.h"
#include "postmaster/bgworker.h"

/* launcher.c says how one follows the other. */
typedef enum DatabaseState
{
	DATABASE_NEW,
	DATABASE_REAPED,
	DATABASE_SELDOM
} DatabaseState;

typedef struct Database
{
	Oid oid; /* the hash key */
	DatabaseState state;
	bool refused;				  /* the last visit said so, and the log has it */
	bool listed;				  /* it is in pg_database, and may be visited */
	bool due;					  /* for a visit in this tour */
	BackgroundWorkerHandle *late; /* a worker that did not end in time, or NULL */
} Database;

extern void DatabasesInit(void);
extern List *DatabasesDue(void);

extern bool DatabaseIsWanted(Oid database);
extern bool DatabaseIsOpen(Oid database);

#endif /* IDEMPOTENCY_DATABASES_H */
