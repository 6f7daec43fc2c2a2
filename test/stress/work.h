/*-------------------------------------------------------------------------
 *
 * work.h
 *	  The work of an operation: charge, write, finish.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_WORK_H
#define STRESS_WORK_H

#include "worker.h"

extern void Work(Worker *worker);
extern void WorkInTransaction(Worker *worker);

#endif /* STRESS_WORK_H */
