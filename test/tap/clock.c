/*-------------------------------------------------------------------------
 *
 * clock.c
 *	  Sets the clock of the processes that it is preloaded into.
 *
 * CLOCK_FILE names a file with two 64-bit numbers, in seconds: the offset of the clock
 * and, unless it is zero, the time at which the clock is stopped. A write to that file
 * sets the clock of all these processes at once. CLOCK_MONOTONIC, which measures
 * durations, is unchanged.
 *
 * PostgreSQL reads the time in signal handlers too. Therefore nothing is opened,
 * allocated or locked here after process start. libfaketime does not ensure that: it
 * reads a file with stdio. A handler that interrupts malloc() then corrupts the heap,
 * or waits forever for a lock of its own process.
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

/* Finds the libc function that this library overrides. */
static void
find_real(void)
{
	real_clock_gettime = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
}

/*
 * Maps the file. A process without a valid clock file exits instead of running with the
 * true clock.
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

/* Other libraries can call this before set_up(); they get the true time. */
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
