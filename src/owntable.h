/*-------------------------------------------------------------------------
 *
 * owntable.h
 *	  Finding a table of the extension that is written past the executor.
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

extern void OwnTableInit(void);
extern Relation OwnTableOpen(OwnTable *table, LOCKMODE lockmode);
extern Oid OwnRelationByName(const char *name);

#endif /* IDEMPOTENCY_OWNTABLE_H */
