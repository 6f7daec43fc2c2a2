/*-------------------------------------------------------------------------
 *
 * server/shmem.h
 *	  The shared memory of all parts of the library.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SERVER_SHMEM_H
#define IDEMPOTENCY_SERVER_SHMEM_H

#include "storage/lwlock.h"

/* A part.  Its pointer is NULL unless the library is preloaded. */
typedef struct SharedPart
{
	void **address; /* the pointer to set */
	Size bytes;
	void (*init)(void *, LWLock *); /* initializes zeroed memory; the lock is the part's own */
} SharedPart;

extern void SharedMemoryRegister(const SharedPart *part);
extern void SharedMemoryInit(void);

#endif /* IDEMPOTENCY_SERVER_SHMEM_H */
