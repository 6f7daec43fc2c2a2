/*-------------------------------------------------------------------------
 *
 * history.c
 *	  The history of each operation.
 *
 * Every step was logged in its own transaction, under the lock of its key, so that the
 * log of a key, ordered by ID, is its history. This file replays the log against a
 * model of the protocol: the permitted order of steps, with tokens, attempts, recovery
 * points and times.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "history.h"
#include "plan.h"
#include "tally.h"

typedef enum State
{
	NOTHING, /* is stored */
	LEASED,
	RELEASED, /* with a checkpoint: no owner, but a stored row */
	CLAIMED,  /* without a lease, until the end of the transaction */
	FINISHED
} State;

/* The model of one operation. */
typedef struct Model
{
	State state;
	int64_t token;	 /* of the owner */
	int64_t highest; /* token so far */
	int attempt;
	int64_t until; /* when the lease ends, in microseconds */
	char *point;   /* the last checkpoint, or NULL */
	char *pointState;
	int64_t finisher;
} Model;

/* One line of the log. */
typedef struct Event
{
	int key;
	const char *name;
	int64_t worker;
	int64_t token; /* 0: none */
	int attempt;
	int64_t at;
	int64_t until;
	const char *point;
	const char *state;
} Event;

static void
Wrong(const Event *event, const Model *model, const char *what)
{
	static const char *const states[] = {"nothing", "leased", "released", "claimed", "finished"};

	Violation("[history] operation %d, worker %lld: %s with token %lld, attempt %d, %s; it was %s "
			  "with token %lld (highest %lld), attempt %d",
			  event->key, (long long) event->worker, event->name, (long long) event->token,
			  event->attempt, what, states[model->state], (long long) model->token,
			  (long long) model->highest, model->attempt);
}

static bool
Same(const char *a, const char *b)
{
	return a == NULL || b == NULL ? a == b : strcmp(a, b) == 0;
}

static void
SetPoint(Model *model, const char *point, const char *state)
{
	free(model->point);
	free(model->pointState);
	model->point = point == NULL ? NULL : strdup(point);
	model->pointState = state == NULL ? NULL : strdup(state);
}

/* ----------------------------------------------------------------
 * Steps
 * ----------------------------------------------------------------
 */

/*
 * PlayGrant is a granted claim. Its token must be higher than all before. A takeover
 * must follow the end of the lease, increments the attempt, and returns the last
 * checkpoint.
 */
static void
PlayGrant(Model *model, const Event *event, bool takeover)
{
	if (event->token != 0 && event->token <= model->highest)
		Wrong(event, model, "with a token not higher than all before");
	if (takeover ? model->state != LEASED && model->state != RELEASED : model->state != NOTHING)
		Wrong(event, model, "in the wrong state");
	else if (event->attempt != (takeover ? model->attempt + 1 : 1))
		Wrong(event, model, "with the wrong attempt");
	else if (!Same(event->point, model->point) || !Same(event->state, model->pointState))
		Wrong(event, model, "without the last checkpoint");
	else if (takeover && model->state == LEASED && event->at <= model->until)
		Wrong(event, model, "before the lease expired");

	model->state = event->token == 0 ? CLAIMED : LEASED;
	model->token = event->token;
	model->attempt = event->attempt;
	model->until = event->until;
	if (event->token > model->highest)
		model->highest = event->token;
}

/*
 * PlayOwner is a step that only the owner can take.
 */
static void
PlayOwner(Model *model, const Event *event)
{
	if (model->state != LEASED || event->token != model->token)
		Wrong(event, model, "by a worker that is not the owner");
	if (strcmp(event->name, "renewed") == 0)
		model->until = event->until;
	else if (strcmp(event->name, "checkpoint") == 0)
		SetPoint(model, event->point, event->state);
	else /* released */
	{
		model->state = model->point == NULL ? NOTHING : RELEASED;
		model->token = 0;
	}
}

static void
PlayFinish(Model *model, const Event *event)
{
	if (model->state != (event->token == 0 ? CLAIMED : LEASED) || event->token != model->token)
		Wrong(event, model, "by a worker that is not the owner");
	model->state = FINISHED;
	model->finisher = event->worker;
}

static void
PlayEviction(Model *model, const Event *event)
{
	if (model->state != LEASED && model->state != RELEASED)
		Wrong(event, model, "in the wrong state");
	model->state = NOTHING;
	model->token = 0;
	SetPoint(model, NULL, NULL);
}

/*
 * Play replays one event of the log.
 */
static void
Play(Model *model, const Event *event)
{
	if (strcmp(event->name, "claimed") == 0)
		PlayGrant(model, event, false);
	else if (strcmp(event->name, "taken_over") == 0)
		PlayGrant(model, event, true);
	else if (strcmp(event->name, "evicted") == 0)
		PlayEviction(model, event);
	else if (strcmp(event->name, "finished") == 0)
		PlayFinish(model, event);
	else
		PlayOwner(model, event);
}

/* ----------------------------------------------------------------
 * The log
 * ----------------------------------------------------------------
 */

static int64_t
Number(Session *session, int row, const char *name)
{
	const char *value = Field(session, row, name);

	return value == NULL ? 0 : strtoll(value, NULL, 10);
}

/*
 * HistoryCheck replays the log. Returns which worker finished each operation, or 0; the
 * caller frees it.
 */
int64_t *
HistoryCheck(Session *session)
{
	Model *models = calloc(config.operations, sizeof(Model));
	int64_t *finishers = calloc(config.operations, sizeof(int64_t));
	int rows;

	if (!Ask(session, NULL,
			 "SELECT key, event, worker, token, attempt, point, state, "
			 "(extract(epoch FROM at) * 1000000)::bigint AS at, "
			 "(extract(epoch FROM until) * 1000000)::bigint AS until "
			 "FROM stress.log ORDER BY id"))
		return finishers;
	rows = PQntuples(session->result);
	for (int row = 0; row < rows; row++)
	{
		Event event = {.key = KeyNumber(Field(session, row, "key")),
					   .name = Field(session, row, "event"),
					   .worker = Number(session, row, "worker"),
					   .token = Number(session, row, "token"),
					   .attempt = (int) Number(session, row, "attempt"),
					   .at = Number(session, row, "at"),
					   .until = Number(session, row, "until"),
					   .point = Field(session, row, "point"),
					   .state = Field(session, row, "state")};

		if (event.key < 0)
			Violation("[history] key %s belongs to no operation", Field(session, row, "key"));
		else
			Play(&models[event.key], &event);
	}
	for (int key = 0; key < config.operations; key++)
	{
		finishers[key] = models[key].state == FINISHED ? models[key].finisher : 0;
		SetPoint(&models[key], NULL, NULL);
	}
	free(models);
	printf("  %d steps replayed\n", rows);
	return finishers;
}
