/*-------------------------------------------------------------------------
 *
 * memcheck.h
 *	  Lets AddressSanitizer know what the server would tell valgrind.
 *
 * AddressSanitizer sees what malloc() gave, and palloc() cuts that up by itself:
 * whoever writes past the end of its chunk, or reads one after pfree(), is still
 * inside.  A server that is built for valgrind says which parts of its memory,
 * and which shared buffers, are out of bounds.  This file takes the place of
 * valgrind's own, and marks them.
 *
 * What was never written to is nothing AddressSanitizer knows of; valgrind does.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_MEMCHECK_H
#define IDEMPOTENCY_MEMCHECK_H

#include <stddef.h>
#include <sanitizer/asan_interface.h>

#define VALGRIND_MAKE_MEM_NOACCESS(address, size) __asan_poison_memory_region(address, size)
#define VALGRIND_MAKE_MEM_UNDEFINED(address, size) __asan_unpoison_memory_region(address, size)
#define VALGRIND_MAKE_MEM_DEFINED(address, size) __asan_unpoison_memory_region(address, size)
#define VALGRIND_CHECK_MEM_IS_DEFINED(address, size) ((void) 0)

/* A chunk that is freed was marked when it was wiped. */
#define VALGRIND_CREATE_MEMPOOL(pool, redzone, zeroed) ((void) 0)
#define VALGRIND_DESTROY_MEMPOOL(pool) ((void) 0)
#define VALGRIND_MEMPOOL_TRIM(pool, address, size) ((void) 0)
#define VALGRIND_MEMPOOL_ALLOC(pool, address, size) __asan_unpoison_memory_region(address, size)
#define VALGRIND_MEMPOOL_FREE(pool, address) ((void) 0)
#define VALGRIND_MEMPOOL_CHANGE(pool, old, address, size)                                          \
	__asan_unpoison_memory_region(address, size)

#define VALGRIND_COUNT_ERRORS 0
#define VALGRIND_PRINTF(...) ((void) 0)
#define RUNNING_ON_VALGRIND 0

#endif /* IDEMPOTENCY_MEMCHECK_H */
