/*-------------------------------------------------------------------------
 *
 * query/relation.h
 *	  The extension's tables, sequences and row types.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_QUERY_RELATION_H
#define IDEMPOTENCY_QUERY_RELATION_H

#include "access/tupdesc.h"
#include "storage/lockdefs.h"
#include "utils/relcache.h"

typedef struct ExtensionTable
{
	const char *name;
	const char *trigger;		   /* its statement-level BEFORE UPDATE trigger, or NULL */
	void (*check)(Relation table); /* throws 55000 if it was altered */
	bool isRead;				   /* the library only reads it: it can have triggers */
	struct ExtensionTable *next;   /* of those that are registered for invalidations */
	bool registered;
	Oid relid;	  /* of the latest lookup */
	bool checked; /* since its last change */
} ExtensionTable;

/* A column of a table, as the extension created it. */
typedef struct TableColumn
{
	const char *name;
	Oid type;
	bool notNull;
} TableColumn;

typedef enum RelationsLockResult
{
	RELATIONS_LOCKED,
	RELATIONS_BUSY,	  /* another transaction drops or alters one of them */
	RELATIONS_MISSING /* as in an older version of the extension */
} RelationsLockResult;

/* The increment of a sequence whose values get random bits. */
#define SEQUENCE_RANDOM 131072

extern RelationsLockResult ExtensionRelationsLock(const char *const *names, int count);
extern bool ExtensionRelationLock(const char *name, LOCKMODE lockmode, bool dontWait);
extern bool ExtensionIsSubscriber(void);
extern void TableCheckColumns(Relation table, const TableColumn *columns, int count);
extern void CompositeCheck(TupleDesc desc, const char *type, const Oid *attributes, int count);
extern Relation ExtensionTableOpen(ExtensionTable *table, LOCKMODE lockmode);
extern Relation ExtensionSequenceOpen(const char *name, const char *purpose, int64 *increment);
extern Oid ExtensionRelationOid(const char *name);

#endif /* IDEMPOTENCY_QUERY_RELATION_H */
