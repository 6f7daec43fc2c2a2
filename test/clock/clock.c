/*-------------------------------------------------------------------------
 *
 * clock.c
 *	  Sets the clock of the processes that it is preloaded into.
 *
 * The file that CLOCK_FILE names holds two numbers of 64 bits, in seconds: by how
 * much the clock is off, and, unless that is zero, the time at which it stands
 * instead.  Whoever writes them in place sets the clock of all these processes at
 * once.  What measures how long something takes, CLOCK_MONOTONIC, goes on as it did.
 *
 * PostgreSQL asks for the time in the handlers of signals too.  So nothing is opened,
 * allocated or locked here once the process has begun, which cannot be said of
 * libfaketime: it reads a file with stdio, and a handler that interrupts malloc()
 * damages the heap there, or waits for a lock of its own process forever.
 *
 * Built by: cc -shared -fPIC -o clock.so clock.c
 *
 *-------------------------------------------------------------------------
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef struct Clock
{
	int64_t offset;
	int64_t standstill;
} Clock;

static int (*real_clock_gettime)(clockid_t, struct timespec *) = NULL;
static const volatile Clock *setting = NULL;

/* Finds the function that ours stands before. */
static void
find_real(void)
{
	real_clock_gettime = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
}

/*
 * Maps the file.  A process that cannot be given another clock ends, rather than run
 * with the right one.
 */
static void __attribute__((constructor)) set_up(void)
{
	const char *path = getenv("CLOCK_FILE");
	int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
	struct stat status;
	void *map = MAP_FAILED;

	find_real();
	if (file >= 0 && fstat(file, &status) == 0 && status.st_size == sizeof(Clock))
		map = mmap(NULL, sizeof(Clock), PROT_READ, MAP_SHARED, file, 0);
	if (real_clock_gettime == NULL || map == MAP_FAILED)
	{
		fprintf(stderr, "CLOCK_FILE names no clock: %s\n", path == NULL ? "(nothing)" : path);
		_exit(1);
	}
	close(file);
	setting = map;
}

/* Other libraries may ask before set_up() is called: the clock is right until then. */
int
clock_gettime(clockid_t id, struct timespec *now)
{
	int64_t standstill;
	int result;

	if (real_clock_gettime == NULL)
		find_real();
	result = real_clock_gettime(id, now);
	if (result != 0 || setting == NULL || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE))
		return result;
	standstill = setting->standstill;
	if (standstill != 0)
		*now = (struct timespec){.tv_sec = standstill};
	else
		now->tv_sec += setting->offset;
	return 0;
}

int
gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec precise;

	(void) zone;
	clock_gettime(CLOCK_REALTIME, &precise);
	*now = (struct timeval){.tv_sec = precise.tv_sec, .tv_usec = precise.tv_nsec / 1000};
	return 0;
}

time_t
time(time_t *result)
{
	struct timespec precise;

	clock_gettime(CLOCK_REALTIME, &precise);
	if (result != NULL)
		*result = precise.tv_sec;
	return precise.tv_sec;
}
