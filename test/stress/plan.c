/*-------------------------------------------------------------------------
 *
 * plan.c
 *	  The settings and the operations of a run.
 *
 * Operations are numbered. Of retries, three of four are charges, with the request that
 * claim() needs; the fourth is a message of an inbox. Attempts are numbered too, and choose
 * operations by a front that moves over all operations once in a run. Most attempts
 * choose one of the few keys right behind the front, so that many clients compete for a
 * key that is not yet stored. The others choose older keys, where they must receive the
 * stored response.
 *
 * All of it is a function of the seed, and needs no locks.
 *
 *-------------------------------------------------------------------------
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* One of so many operations belongs to a pair. */
#define PAIR_DISTANCE 8

Config config;

/* ----------------------------------------------------------------
 * Settings
 * ----------------------------------------------------------------
 */

static long long
NumberFromEnvironment(const char *name, long long ifUnset, long long least)
{
	const char *text = getenv(name);
	char *end;
	long long number;

	if (text == NULL || *text == '\0')
		return ifUnset;
	number = strtoll(text, &end, 10);
	if (*end != '\0' || number < least)
	{
		fprintf(stderr, "stress: %s must be a number from %lld on, not \"%s\"\n", name, least,
				text);
		exit(2);
	}
	return number;
}

/*
 * ConfigRead reads the settings of the run from the environment. Exits with 2 if one is
 * invalid.
 */
void
ConfigRead(const Workload *workload)
{
	const char *wrong = getenv("STRESS_BREAK");

	config.workload = workload;
	config.clients = (int) NumberFromEnvironment("CLIENTS", workload->clients, 1);
	config.operations = (int) NumberFromEnvironment("OPERATIONS", workload->operations, 16);
	config.attempts = NumberFromEnvironment("RETRIES", 3, 1) * config.operations;
	config.seed = (uint64_t) NumberFromEnvironment("SEED", 1, 0);
	config.wrong = wrong != NULL && *wrong != '\0' ? wrong : NULL;
}

/*
 * WrongOnPurpose returns whether the run must make the mistake "what", to show that the
 * checks detect it.
 */
bool
WrongOnPurpose(const char *what)
{
	return config.wrong != NULL && strcmp(config.wrong, what) == 0;
}

/* ----------------------------------------------------------------
 * Operations
 * ----------------------------------------------------------------
 */

/*
 * IsLeased returns whether the operations run under leases.
 */
bool
IsLeased(void)
{
	return config.workload == &leasesWorkload;
}

bool
IsInbox(int key)
{
	return key % 4 == 3;
}

const char *
ScopeOf(int key)
{
	if (IsLeased())
		return "stress/lease";
	return IsInbox(key) ? "stress/inbox" : "stress/charge";
}

/*
 * TableOf returns the table of the operation's effects. Of those of leases, one requires a
 * claim.
 */
const char *
TableOf(int key)
{
	if (IsLeased())
		return key % 2 == 0 ? "stress.orders" : "stress.bookings";
	return IsInbox(key) ? "stress.deliveries" : "stress.charges";
}

int
AmountOf(int key)
{
	return 1 + (int) (Mix(config.seed, key) % 100000);
}

/*
 * KeyText writes the key of the operation. It starts with random digits, so that
 * consecutive keys are not adjacent in the index.
 */
void
KeyText(int key, char text[KEY_TEXT])
{
	snprintf(text, KEY_TEXT, "%016" PRIx64 "-%d", Mix(key, config.seed), key);
}

/*
 * KeyNumber returns the operation of a key, or -1 if there is none.
 */
int
KeyNumber(const char *text)
{
	const char *dash = strchr(text, '-');
	char expected[KEY_TEXT];
	int key;

	if (dash == NULL)
		return -1;
	key = atoi(dash + 1);
	if (key < 0 || key >= config.operations)
		return -1;
	KeyText(key, expected);
	return strcmp(text, expected) == 0 ? key : -1;
}

/*
 * RequestText writes the operation's request, or another one. It is the same JSON value
 * in all attempts, but different text.
 */
void
RequestText(int key, bool another, Random *random, char text[REQUEST_TEXT])
{
	static const char *const spaces[] = {"", " ", "  ", "\n\t"};
	const char *space = spaces[RandomBelow(random, 4)];
	int amount = AmountOf(key) + (another ? 1 : 0);
	char name[KEY_TEXT];

	KeyText(key, name);
	if (RandomPercent(random, 50))
		snprintf(text, REQUEST_TEXT, "{%s\"key\":%s\"%s\",%s\"amount\":%d%s}", space, space, name,
				 space, amount, space);
	else
		snprintf(text, REQUEST_TEXT, "%s{\"amount\":%s%d.0,\"k\\u0065y\"%s:\"%s\"}", space, space,
				 amount, space, name);
}

/*
 * PickKey returns the operation of an attempt.
 */
int
PickKey(int64_t attempt, Random *random)
{
	int front = (int) (attempt * config.operations / config.attempts);
	int dice = RandomBelow(random, 100);
	int behind;

	if (dice < 75)
		behind = (int) (-log(1 - RandomUnit(random)) * 3);
	else if (dice < 90)
		behind = RandomBelow(random, 100);
	else
		behind = RandomBelow(random, front + 1);
	return behind > front ? front : front - behind;
}

/*
 * PickPair chooses two operations, in any order. Consecutive attempts at a pair get the
 * same pair, so that they deadlock.
 */
void
PickPair(int64_t attempt, Random *random, int keys[2])
{
	int front = (int) (attempt * config.operations / config.attempts);
	int first = RandomBelow(random, 2);

	/* The last operation might have no successor. */
	keys[first] = front - front % PAIR_DISTANCE;
	if (keys[first] + 1 == config.operations)
		keys[first]--;
	keys[1 - first] = keys[first] + 1;
}

/*
 * PickInboxKey returns a message near the operation that PickKey() returns.
 */
int
PickInboxKey(int64_t attempt, Random *random)
{
	int key = PickKey(attempt, random);

	key += 3 - key % 4;
	return key < config.operations ? key : key - 4;
}

/* ----------------------------------------------------------------
 * Responses
 * ----------------------------------------------------------------
 */

/*
 * Filler returns digits, in a few cases more than a row can store.
 */
static char *
Filler(Random *random)
{
	int bytes =
		RandomPercent(random, 2) ? 3000 + RandomBelow(random, 6000) : RandomBelow(random, 20);
	char *filler = malloc(bytes + 1);

	for (int i = 0; i < bytes; i++)
		filler[i] = "0123456789abcdef"[RandomBelow(random, 16)];
	filler[bytes] = '\0';
	return filler;
}

/*
 * ReplyMake returns the unique response that the attempt stores if it is the owner.
 * ReplyFree() frees it.
 */
Reply
ReplyMake(int64_t attempt, bool failed, Random *random)
{
	static const int good[] = {200, 201, 202, 299};
	static const int bad[] = {402, 409, 422, 599};
	Reply reply = {.failed = failed};
	char *filler = Filler(random);
	const char *space = RandomPercent(random, 50) ? " " : "";

	reply.status = (failed ? bad : good)[RandomBelow(random, 4)];
	if (RandomPercent(random, 50))
		(void) !asprintf(&reply.headers, "{%s\"X-Attempt\":  \"%" PRId64 "\"}", space, attempt);
	if (RandomPercent(random, 97))
		(void) !asprintf(&reply.response,
						 "{ \"attempt\":%s%" PRId64 ", \"attempt\":%" PRId64
						 ",\"note\":\"\\u00e9\\/%s\"%s}",
						 space, attempt, attempt, filler, space);
	free(filler);
	return reply;
}

void
ReplyFree(Reply *reply)
{
	free(reply->headers);
	free(reply->response);
}

/*
 * AnswerText joins a response into one text for a comparison byte by byte. NULL stands
 * for NULL. The caller frees it.
 */
char *
AnswerText(const char *status, const char *failed, const char *headers, const char *response)
{
	char *answer;

	(void) !asprintf(&answer, "%s %s headers %s response %s", status ? status : "-",
					 failed ? failed : "-", headers ? headers : "-", response ? response : "-");
	return answer;
}

/*
 * ReplyAnswer returns the text of "reply".
 */
char *
ReplyAnswer(const Reply *reply)
{
	char status[16];

	snprintf(status, sizeof(status), "%d", reply->status);
	return AnswerText(status, reply->failed ? "t" : "f", reply->headers, reply->response);
}

/*
 * AnswerAttempt returns the attempt that created the response, or -1 if the response
 * does not contain it.
 */
int64_t
AnswerAttempt(const char *answer)
{
	const char *name = strcasestr(answer, "attempt\"");

	return name == NULL ? -1 : strtoll(name + strcspn(name, "0123456789"), NULL, 10);
}
