/*-------------------------------------------------------------------------
 *
 * memcheck.h
 *	  Passes the server's valgrind client requests to AddressSanitizer.
 *
 * AddressSanitizer knows the blocks of malloc(), which palloc() divides itself. A write
 * past the end of a chunk, or a read after pfree(), stays within such a block. A server
 * that is built for valgrind marks the parts of its memory, and shared buffers, that
 * are out of bounds. This file replaces valgrind's header, and passes the marks to
 * AddressSanitizer.
 *
 * AddressSanitizer does not detect uninitialized memory; valgrind does.
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

/* A freed chunk was marked when it was wiped. */
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
