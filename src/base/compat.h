/*-------------------------------------------------------------------------
 *
 * base/compat.h
 *	  The differences between server versions; no other file tests the version.
 *
 * Each entry gives older servers the newest server's form, and is removed with the last
 * server that needs it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_COMPAT_H
#define IDEMPOTENCY_BASE_COMPAT_H

#if PG_VERSION_NUM < 150000
#error "idempotency needs PostgreSQL 15 or newer"
#endif

/* 16: the accessors of varlena values are no longer in postgres.h. */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

/* 16: settings have a function to allocate memory. */
#if PG_VERSION_NUM < 160000
#define guc_malloc(elevel, size) malloc(size)
#endif

/* 16: one function checks the rights on every kind of object. */
#if PG_VERSION_NUM < 160000
#define object_aclcheck(classid, objectid, roleid, mode) pg_proc_aclcheck(objectid, roleid, mode)
#define database_aclcheck(database, role, mode) pg_database_aclcheck(database, role, mode)
#else
#define database_aclcheck(database, role, mode)                                                    \
	object_aclcheck(DatabaseRelationId, database, role, mode)
#endif

/* 16: stringToQualifiedNameList() takes an error context. */
#if PG_VERSION_NUM < 160000
#define stringToQualifiedNameListCompat(string) stringToQualifiedNameList(string)
#else
#define stringToQualifiedNameListCompat(string) stringToQualifiedNameList(string, NULL)
#endif

/* 16: a membership can lack SET ROLE. */
#if PG_VERSION_NUM < 160000
#define member_can_set_role(member, role) is_member_of_role(member, role)
#endif

/* 16: updates tell which indexes need entries; summarizing ones can be the only ones. */
#if PG_VERSION_NUM < 160000
typedef bool TU_UpdateIndexes;
#define TU_None false
#define TU_Summarizing false
#endif

/* 16: only the entries of summarizing indexes; 19: flags instead of booleans. */
#if PG_VERSION_NUM < 160000
#define ExecInsertIndexTuplesCompat(rri, slot, estate, update, noDupErr, specConflict, arbiters,   \
									onlySummarizing)                                               \
	ExecInsertIndexTuples(rri, slot, estate, update, noDupErr, specConflict, arbiters)
#elif PG_VERSION_NUM < 190000
#define ExecInsertIndexTuplesCompat ExecInsertIndexTuples
#else
#define ExecInsertIndexTuplesCompat(rri, slot, estate, update, noDupErr, specConflict, arbiters,   \
									onlySummarizing)                                               \
	ExecInsertIndexTuples(rri, estate,                                                             \
						  ((update) ? EIIT_IS_UPDATE : 0) |                                        \
							  ((noDupErr) ? EIIT_NO_DUPE_ERROR : 0) |                              \
							  ((onlySummarizing) ? EIIT_ONLY_SUMMARIZING : 0),                     \
						  slot, arbiters, specConflict)
#endif

/* 16: find_option() is exported. */
#if PG_VERSION_NUM >= 160000
#define SERVER_FINDS_SETTINGS
#endif

/* 17: intervals can be infinite. */
#if PG_VERSION_NUM < 170000
#define INTERVAL_IS_NOEND(interval) false
#endif

/* 16: the tree walkers declare their callbacks; C23 takes the older form for one without arguments.
 */
#if PG_VERSION_NUM < 160000
#define TreeWalker(walker) ((void *) (walker))
#else
#define TreeWalker(walker) (walker)
#endif

/* 19: the planner knows of EXPLAIN. */
#if PG_VERSION_NUM < 190000
#define PLANNER_PARAMETERS Query *parse, const char *text, int options, ParamListInfo parameters
#define PLANNER_ARGUMENTS parse, text, options, parameters
#else
#define PLANNER_PARAMETERS                                                                         \
	Query *parse, const char *text, int options, ParamListInfo parameters, ExplainState *explain
#define PLANNER_ARGUMENTS parse, text, options, parameters, explain
#endif

/* 17: wait events of extensions have names. */
#if PG_VERSION_NUM < 170000
#define WaitEventExtensionNew(name) PG_WAIT_EXTENSION
#endif

/*
 * 17: on a server with injection points, tests can stop a session before the named step
 * (test/tap/t/030_injection_keys.pl, 031_injection_outbox.pl).
 */
#ifndef USE_INJECTION_POINTS
#define InjectionPoint(name) ((void) 0)
#elif PG_VERSION_NUM < 180000
#include "utils/injection_point.h"
#define InjectionPoint(name) INJECTION_POINT("idempotency-" name)
#else
#include "utils/injection_point.h"
#define InjectionPoint(name) INJECTION_POINT("idempotency-" name, NULL)
#endif

/* 17: transaction_timeout. */
#if PG_VERSION_NUM >= 170000
#define SERVER_LIMITS_TRANSACTIONS
#endif

/* 17: a worker can connect as a role without LOGIN. */
#if PG_VERSION_NUM >= 170000
#define SERVER_CONNECTS_WITHOUT_LOGIN
#else
#define BGWORKER_BYPASS_ROLELOGINCHECK 0
#endif

/* 17, and later minor releases of 15 and 16: a failed DROP DATABASE is recorded. */
#ifndef DATCONNLIMIT_INVALID_DB
#define DATCONNLIMIT_INVALID_DB -2
#endif

/* 18: the attribute precedes the declaration. */
#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

/* 18: arguments for a deferrable primary key, and for a tuple to exclude. */
#if PG_VERSION_NUM < 180000
#define RelationGetPrimaryKeyIndexCompat(rel) RelationGetPrimaryKeyIndex(rel)
#define ExecCheckIndexConstraintsCompat(rri, slot, estate, conflictTid, arbiters)                  \
	ExecCheckIndexConstraints(rri, slot, estate, conflictTid, arbiters)
#else
#define RelationGetPrimaryKeyIndexCompat(rel) RelationGetPrimaryKeyIndex(rel, false)
#define ExecCheckIndexConstraintsCompat(rri, slot, estate, conflictTid, arbiters)                  \
	ExecCheckIndexConstraints(rri, slot, estate, conflictTid, NULL, arbiters)
#endif

/* 18: the server generates UUIDs of version 7. */
#if PG_VERSION_NUM >= 180000
#define SERVER_MAKES_UUIDV7
#endif

/* 16, 17: process and transaction IDs of a virtual transaction. */
#if PG_VERSION_NUM < 170000
#define VirtualTransactionGetProc(vxid) BackendIdGetProc((vxid).backendId)
#else
#define VirtualTransactionGetProc(vxid) ProcNumberGetProc((vxid).procNumber)
#endif
#if PG_VERSION_NUM < 160000
#define VirtualTransactionGetIds(vxid, xid, xmin, subxids, overflowed)                             \
	BackendIdGetTransactionIds((vxid).backendId, xid, xmin)
#elif PG_VERSION_NUM < 170000
#define VirtualTransactionGetIds(vxid, xid, xmin, subxids, overflowed)                             \
	BackendIdGetTransactionIds((vxid).backendId, xid, xmin, subxids, overflowed)
#else
#define VirtualTransactionGetIds(vxid, xid, xmin, subxids, overflowed)                             \
	ProcNumberGetTransactionIds((vxid).procNumber, xid, xmin, subxids, overflowed)
#endif

/* 18: index scans carry instrumentation; 19: and flags. */
#if PG_VERSION_NUM < 180000
#define index_beginscan_compat(heap, index, snapshot, nkeys)                                       \
	index_beginscan(heap, index, snapshot, nkeys, 0)
#elif PG_VERSION_NUM < 190000
#define index_beginscan_compat(heap, index, snapshot, nkeys)                                       \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#else
#define index_beginscan_compat(heap, index, snapshot, nkeys)                                       \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0, 0)
#endif

/* 19: updates and deletes take options, of which a partition key that changes is one. */
#if PG_VERSION_NUM < 190000
#define table_tuple_update_compat table_tuple_update
#define table_tuple_delete_compat(table, tid, cid, snapshot, wait, failure)                        \
	table_tuple_delete(table, tid, cid, snapshot, InvalidSnapshot, wait, failure, false)
#else
#define table_tuple_update_compat(table, tid, slot, cid, ...)                                      \
	table_tuple_update(table, tid, slot, cid, 0, __VA_ARGS__)
#define table_tuple_delete_compat(table, tid, cid, snapshot, wait, failure)                        \
	table_tuple_delete(table, tid, cid, 0, snapshot, InvalidSnapshot, wait, failure)
#endif

/* 19: pruning a page can set bits in the visibility map, whose page stays pinned. */
#if PG_VERSION_NUM < 190000
#define heap_page_prune_opt_compat(table, buffer) heap_page_prune_opt(table, buffer)
#else
#define heap_page_prune_opt_compat(table, buffer)                                                  \
	do                                                                                             \
	{                                                                                              \
		Buffer visibilityMap = InvalidBuffer;                                                      \
		heap_page_prune_opt(table, buffer, &visibilityMap, false);                                 \
		if (BufferIsValid(visibilityMap))                                                          \
			ReleaseBuffer(visibilityMap);                                                          \
	} while (0)
#endif

/* 19: signal handlers have a second argument, the sender. */
#if PG_VERSION_NUM < 190000
#define SIGNAL_PASS postgres_signal_arg
#define SIGNAL_FROM_HERE(signo) signo
#else
#define SIGNAL_PASS postgres_signal_arg, pg_siginfo
#define SIGNAL_FROM_HERE(signo)                                                                    \
	signo, &(const pg_signal_info)                                                                 \
	{                                                                                              \
		0                                                                                          \
	}
#endif

#endif /* IDEMPOTENCY_BASE_COMPAT_H */
