/*-------------------------------------------------------------------------
 *
 * ledger.h
 *	  The responses that the clients received for each operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_LEDGER_H
#define STRESS_LEDGER_H

#include <stdbool.h>

extern void LedgerMake(void);
extern bool Acknowledged(int key);
extern void Acknowledge(int key);
extern void AcknowledgeAnswer(int key, const char *answer, const char *expires);
extern const char *LedgerAnswer(int key);
extern long long LedgerCount(void);

#endif /* STRESS_LEDGER_H */
