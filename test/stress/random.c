/*-------------------------------------------------------------------------
 *
 * random.c
 *	  Random numbers that a seed determines.
 *
 * Each attempt has its own stream, derived from the run's seed and the attempt's
 * number. Its choices therefore do not depend on the client that runs it or on the
 * interleaving of clients. Needs no locks.
 *-------------------------------------------------------------------------
 */
#include "random.h"

/*
 * Mix combines the bits of two numbers into one.
 */
uint64_t
Mix(uint64_t a, uint64_t b)
{
	uint64_t x = a * UINT64_C(0x9E3779B97F4A7C15) + b + UINT64_C(0x632BE59BD9B4E019);

	x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
	return x ^ (x >> 31);
}

/*
 * RandomSeed starts the stream of that number.
 */
void
RandomSeed(Random *random, uint64_t seed, uint64_t stream)
{
	random->state = Mix(seed, stream);
}

static uint64_t
RandomNext(Random *random)
{
	random->state++;
	return Mix(random->state, random->state >> 17);
}

/*
 * RandomBelow returns 0 to limit - 1.
 */
int
RandomBelow(Random *random, int limit)
{
	return (int) (RandomNext(random) % (uint64_t) limit);
}

/*
 * RandomUnit returns a number from 0 up to, but not including, 1.
 */
double
RandomUnit(Random *random)
{
	return (double) (RandomNext(random) >> 11) * 0x1p-53;
}

/*
 * RandomPercent returns true with that probability.
 */
bool
RandomPercent(Random *random, double percent)
{
	return RandomUnit(random) * 100 < percent;
}
