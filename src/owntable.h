/*-------------------------------------------------------------------------
 *
 * owntable.h
 *	  Finding a table of the extension that is written past the executor, and a
 *	  sequence whose order matters.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OWNTABLE_H
#define IDEMPOTENCY_OWNTABLE_H

#include "storage/lockdefs.h"
#include "utils/relcache.h"

typedef struct OwnTable
{
	const char *name;
	void (*check)(Relation table); /* throws 55000 if it is not as we made it */
	Oid relid;					   /* once found */
	bool checked;				   /* since its last change */
} OwnTable;

typedef enum OwnLock
{
	OWN_LOCKED,
	OWN_BUSY,	/* somebody drops or alters one of them */
	OWN_MISSING /* as in an older version of the extension */
} OwnLock;

extern OwnLock OwnRelationsLock(const char *const *names, int count);
extern void OwnRelationsAwait(const char *const *names, int count);
extern bool OwnRelationTake(const char *name, LOCKMODE lockmode, bool dontWait);
extern void OwnTableInit(void);
extern bool OwnTablesFollow(void);
extern Relation OwnTableOpen(OwnTable *table, LOCKMODE lockmode);
extern Relation OwnSequenceOpen(const char *name, const char *purpose);
extern Oid OwnRelationByName(const char *name);

#endif /* IDEMPOTENCY_OWNTABLE_H */
