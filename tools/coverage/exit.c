/*
 * exit.c: keeps the counts of processes that end without exit().
 *
 * A backend ends by _exit() in an immediate stop and after a crash of another one. This
 * file is built twice: as part of the extension (DUMP), and as a library that LD_PRELOAD
 * puts before libc.  The counts of a process that SIGKILL ends are lost.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef DUMP
extern void __gcov_dump(void);

__attribute__((visibility("default"))) void idempotency_dump_coverage(void);

void
idempotency_dump_coverage(void)
{
	__gcov_dump();
}
#else
void
_exit(int status)
{
	void (*dump)(void) = (void (*)(void)) dlsym(RTLD_DEFAULT, "idempotency_dump_coverage");

	if (dump)
		dump();
	syscall(SYS_exit_group, status);
	__builtin_unreachable();
}
#endif
