/*-------------------------------------------------------------------------
 *
 * random.h
 *	  Random numbers that a seed determines.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_RANDOM_H
#define STRESS_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct Random
{
	uint64_t state;
} Random;

extern uint64_t Mix(uint64_t a, uint64_t b);
extern void RandomSeed(Random *random, uint64_t seed, uint64_t stream);
extern int RandomBelow(Random *random, int limit);
extern bool RandomPercent(Random *random, double percent);
extern double RandomUnit(Random *random);

#endif /* STRESS_RANDOM_H */
