/*-------------------------------------------------------------------------
 *
 * effect.c
 *	  Calls the stored procedure for each message.
 *
 * One call is one transaction: the procedure calls idempotency.once() with the event's
 * id, and writes, and both commit together or not at all. Therefore a call whose answer
 * is lost can be repeated, and a message that is not acknowledged can be redelivered.
 *
 * Messages are handled one after the other. A message that fails blocks the following
 * ones until it succeeds, or is moved to the dead stream after the last attempt: a
 * later event of an aggregate must not overtake it. Transient errors (a deadlock, a
 * lost connection, a lock that another consumer holds) do not count as attempts.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "consumer.h"

/* The arguments of the function, in this order. */
#define SIGNATURE "(uuid, text, text, text, json, json)"

/*
 * FindFunction looks up the function, so that the program passes a name and not SQL,
 * and reports a missing function before the first message. Makes the program exit if
 * the function does not exist. Returns whether it was found.
 */
bool
FindFunction(Consumer *consumer)
{
	char signature[512];
	const char *const parameters[] = {signature};
	Answer answer;

	snprintf(signature, sizeof(signature), "%s%s", consumer->function, SIGNATURE);
	answer = PostgresAsk(
		&consumer->postgres,
		"SELECT pg_catalog.format('SELECT %I.%I($1::uuid, $2, $3, $4, $5::json, $6::json) AS new',"
		" n.nspname, p.proname) AS call"
		" FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace"
		" WHERE p.oid = $1::regprocedure AND p.prorettype = 'boolean'::regtype"
		" AND NOT p.proretset AND p.prokind = 'f'",
		1, parameters);
	if (answer == ANSWER_OK && PQntuples(consumer->postgres.result) == 1)
	{
		consumer->call = strdup(PostgresValue(&consumer->postgres, 0, "call"));
		return consumer->call != NULL;
	}
	if (answer == ANSWER_OK || answer == ANSWER_REFUSED)
	{
		LogInfo("%s must be a function %s RETURNS boolean%s%s", consumer->function, SIGNATURE,
				answer == ANSWER_OK ? "" : ": ", consumer->postgres.error);
		RequestExit(EXIT_REFUSED);
	}
	else if (answer == ANSWER_AGAIN)
		(void) PostgresPause(&consumer->postgres);
	return false;
}

/*
 * Call calls the function for one message, once.  Needs a message with an id and a
 * payload.
 */
static Answer
Call(Consumer *consumer, const Message *message)
{
	const char *const parameters[] = {
		MessageField(message, "id"),		  MessageField(message, "aggregatetype"),
		MessageField(message, "aggregateid"), MessageField(message, "type"),
		MessageField(message, "payload"),	  MessageField(message, "headers")};
	Answer answer = PostgresAsk(&consumer->postgres, consumer->call, 6, parameters);
	const char *new;

	if (answer == ANSWER_OK)
	{
		new = PostgresValue(&consumer->postgres, 0, "new");
		consumer->handled++;
		if (new == NULL || new[0] != 't')
			consumer->seenBefore++;
	}
	return answer;
}

/*
 * Failed counts an attempt at a message, and sleeps before the next one, or moves the
 * message to the dead stream after the last. Returns whether the message is finished.
 *
 * A missing procedure or a missing privilege is not an error of the message: SQLSTATE
 * class 42 ends the program instead.
 */
static bool
Failed(Consumer *consumer, const Message *message, int attempt)
{
	const char *error = consumer->postgres.error;

	if (strncmp(consumer->postgres.state, "42", 2) == 0)
	{
		LogInfo("%s %s: %s", message->stream, message->entry, error);
		RequestExit(EXIT_REFUSED);
		return false;
	}
	LogInfo("%s %s: attempt %d of %d: %s", message->stream, message->entry, attempt,
			consumer->maxAttempts, error);
	if (attempt >= consumer->maxAttempts)
		return MoveToDeadStream(consumer, message, error);
	(void) Pause(attempt);
	return false;
}

/*
 * Try calls the function for a message until it succeeds, or the message is moved to
 * the dead stream. Returns false if the program must exit, or Redis is lost, first.
 */
static bool
Try(Consumer *consumer, const Message *message)
{
	bool first = true;
	int attempts = 0;

	/* The current message is tried once, even if the program must exit. */
	while ((first || !ExitRequested()) && PostgresReady(&consumer->postgres) &&
		   consumer->redis.context != NULL)
	{
		first = false;
		switch (Call(consumer, message))
		{
			case ANSWER_OK:
				return true;
			case ANSWER_REFUSED:
				if (Failed(consumer, message, ++attempts))
					return true;
				break;
			case ANSWER_AGAIN:
				LogInfo("%s %s: %s", message->stream, message->entry, consumer->postgres.error);
				(void) PostgresPause(&consumer->postgres);
				break;
			case ANSWER_LOST:
			case ANSWER_STOPPED:
				break;
		}
	}
	return false;
}

/*
 * Handle handles one message. Returns whether it is finished.
 */
static bool
Handle(Consumer *consumer, const Message *message)
{
	if (message->fields->type != REDIS_REPLY_ARRAY)
	{
		LogInfo("%s %s: LOST, the stream was trimmed before it was handled", message->stream,
				message->entry);
		return true;
	}
	if (MessageField(message, "id") == NULL || MessageField(message, "payload") == NULL)
		return MoveToDeadStream(consumer, message, "no id, or no payload");
	return Try(consumer, message);
}

/*
 * HandleMessages handles the messages of a read in order. Returns the number of
 * messages, from the first on, that are finished and must be acknowledged.
 */
int
HandleMessages(Consumer *consumer, const redisReply *reply)
{
	Message message;
	int count = 0;

	while (NextMessage(reply, count, &message) && Handle(consumer, &message))
		count++;
	return count;
}
