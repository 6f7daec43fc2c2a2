/*-------------------------------------------------------------------------
 *
 * plan.h
 *	  The settings and the operations of a run.
 *
 *-------------------------------------------------------------------------
 */
#ifndef STRESS_PLAN_H
#define STRESS_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "random.h"
#include "workload.h"

typedef struct Config
{
	const Workload *workload;
	int clients;
	int operations;	   /* each has its own key */
	int64_t attempts;  /* before the final pass */
	uint64_t seed;	   /* determines every attempt */
	const char *wrong; /* a deliberate mistake, or NULL */
} Config;

extern Config config;

#define KEY_TEXT 64
#define REQUEST_TEXT 192

/* What an owner stores; strings are malloc()ed, and NULL is NULL. */
typedef struct Reply
{
	bool failed;
	int status;
	char *headers;
	char *response;
} Reply;

extern void ConfigRead(const Workload *workload);
extern bool WrongOnPurpose(const char *what);

extern bool IsLeased(void);
extern bool IsInbox(int key);
extern const char *ScopeOf(int key);
extern const char *TableOf(int key);
extern int AmountOf(int key);
extern void KeyText(int key, char text[KEY_TEXT]);
extern int KeyNumber(const char *text);
extern void RequestText(int key, bool another, Random *random, char text[REQUEST_TEXT]);
extern int PickKey(int64_t attempt, Random *random);
extern void PickPair(int64_t attempt, Random *random, int keys[2]);
extern int PickInboxKey(int64_t attempt, Random *random);

extern Reply ReplyMake(int64_t attempt, bool failed, Random *random);
extern char *ReplyAnswer(const Reply *reply);
extern void ReplyFree(Reply *reply);
extern char *AnswerText(const char *status, const char *failed, const char *headers,
						const char *response);
extern int64_t AnswerAttempt(const char *answer);

#endif /* STRESS_PLAN_H */
