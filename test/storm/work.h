/*-------------------------------------------------------------------------
 *
 * work.h
 *	  The work of an operation: charge, write, finish.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STORM_WORK_H
#define STORM_WORK_H

#include "worker.h"

extern const char *TableFor(int key);
extern void Work(Worker *worker);
extern void WorkInTransaction(Worker *worker);

#endif /* STORM_WORK_H */
