/*-------------------------------------------------------------------------
 *
 * tally.h
 *	  Counters of events, and reports of violations.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_TALLY_H
#define STRESS_TALLY_H

#include "tallies.h"

typedef enum Tally
{
#define TALLY_NAME(name, text, retries, leases) TALLY_##name,
	TALLY_LIST(TALLY_NAME)
#undef TALLY_NAME
		TALLY_COUNT
} Tally;

extern void Count(Tally tally);
extern long long Counted(Tally tally);
extern void CountError(const char *sqlstate);
extern void TallyPrint(void);
extern void TallyCheck(void);

extern void Violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern int Violations(void);

#endif /* STRESS_TALLY_H */
