/*-------------------------------------------------------------------------
 *
 * base/visits.c
 *	  Requests of sessions that a background worker visit their database.
 *
 * A session requests a visit when it first finds the extension in its database,
 * after a change of the tables, and when its commit changed subscriptions that
 * got no slot in the registry.  The launcher takes the requests when its next cycle begins.
 *
 * Locks: none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "port/atomics.h"
#include "postmaster/bgworker.h"

#include "base/shmem.h"
#include "base/visits.h"

/* How many databases can request a visit at a time. */
#define REQUESTS_MOST 32

/* Databases, or 0 in a free slot; NULL unless the library is preloaded. */
static pg_atomic_uint32 *requests = NULL;

/*
 * RequestVisit requests a visit to this session's database in the next cycle.  Does
 * nothing where the library is not preloaded, or too many databases have requested one:
 * then the visit is later.  A worker on a visit makes no request: it would be started
 * again, in every cycle, where it dies.
 */
void
RequestVisit(void)
{
	bool isReaper = MyBgworkerEntry != NULL && strcmp(MyBgworkerEntry->bgw_type, REAPER_TYPE) == 0;

	if (requests == NULL || isReaper)
		return;
	for (int slot = 0; slot < REQUESTS_MOST; slot++)
	{
		uint32 database = InvalidOid;

		if (pg_atomic_compare_exchange_u32(&requests[slot], &database, MyDatabaseId) ||
			database == MyDatabaseId)
			return;
	}
}

/*
 * TakeVisitRequests returns the databases that have requested a visit since the last call.
 */
List *
TakeVisitRequests(void)
{
	List *databases = NIL;

	for (int slot = 0; slot < REQUESTS_MOST; slot++)
	{
		Oid database = pg_atomic_exchange_u32(&requests[slot], InvalidOid);

		if (OidIsValid(database))
			databases = lappend_oid(databases, database);
	}
	return databases;
}

static void
InitializeRequests(void *memory, LWLock *lock)
{
	for (int slot = 0; slot < REQUESTS_MOST; slot++)
		pg_atomic_init_u32((pg_atomic_uint32 *) memory + slot, InvalidOid);
}

/*
 * VisitRequestsInit registers the shared memory; called from _PG_init().
 */
void
VisitRequestsInit(void)
{
	SharedMemoryRegister(&(SharedPart){
		(void **) &requests, REQUESTS_MOST * sizeof(pg_atomic_uint32), InitializeRequests});
}
