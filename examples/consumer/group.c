/*-------------------------------------------------------------------------
 *
 * group.c
 *	  The consumer group: pending messages of each consumer, and acknowledgements.
 *
 * Redis stores a message as pending for its consumer until it is acknowledged. This
 * consumer reads its own pending messages before new ones. It also claims the messages
 * of consumers that have been idle for long, and then reads them in the same way.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "consumer.h"

/* Messages to claim in one command. */
#define CLAIM_COUNT "1000"

/* Suffix of the stream for messages that failed for the last time. */
#define BURIED ":dead"

/*
 * Refused ends a connection on which Redis refused a command, and frees the reply.
 * Always returns false.
 */
static bool
Refused(Consumer *consumer, redisReply *reply)
{
	if (reply != NULL && consumer->redis.context != NULL)
		RedisLose(&consumer->redis,
				  reply->type == REDIS_REPLY_ERROR ? reply->str : "this reply is not understood");
	if (reply != NULL)
		freeReplyObject(reply);
	consumer->prepared = false;
	return false;
}

/* ----------------------------------------------------------------
 * The group
 * ----------------------------------------------------------------
 */

/*
 * CreateGroup creates the group unless it exists.
 */
static bool
CreateGroup(Consumer *consumer, const char *stream)
{
	redisReply *reply = RedisAskWords(&consumer->redis, "XGROUP", "CREATE", stream, consumer->group,
									  consumer->from, "MKSTREAM", NULL);

	if (reply == NULL || (reply->type == REDIS_REPLY_ERROR &&
						  strncmp(reply->str, "BUSYGROUP", strlen("BUSYGROUP")) != 0))
		return Refused(consumer, reply);
	freeReplyObject(reply);
	return true;
}

/*
 * TakeOver claims the messages of other consumers that have been idle for that long, in
 * milliseconds. It does not need to read them, because they are pending now. Returns
 * false if the connection is lost.
 */
static bool
TakeOver(Consumer *consumer, const char *stream, int64_t idle)
{
	char cursor[64] = "0-0";
	char least[24];
	size_t count = 0;

	snprintf(least, sizeof(least), "%lld", (long long) idle);
	do
	{
		redisReply *reply =
			RedisAskWords(&consumer->redis, "XAUTOCLAIM", stream, consumer->group, consumer->name,
						  least, cursor, "COUNT", CLAIM_COUNT, "JUSTID", NULL);

		if (reply == NULL || reply->type != REDIS_REPLY_ARRAY || reply->elements < 2)
			return Refused(consumer, reply);
		count += reply->element[1]->elements;
		/* Redis 7 returns the entries that were trimmed, and removes them from the
		 * list. */
		if (reply->elements > 2 && reply->element[2]->elements > 0)
			LogInfo("%s: LOST, %zu messages were trimmed before they were handled", stream,
					reply->element[2]->elements);
		snprintf(cursor, sizeof(cursor), "%s", reply->element[0]->str);
		freeReplyObject(reply);
	} while (strcmp(cursor, "0-0") != 0);

	if (count > 0)
	{
		LogDebug("%s: %zu pending messages claimed", stream, count);
		consumer->pending = true;
	}
	return true;
}

/*
 * PrepareGroup prepares a new connection and, at intervals, claims the messages of
 * other consumers. Returns false if the connection is lost.
 *
 * A sole consumer claims at once: all pending messages were delivered to one of its own
 * former names. They are older than all new ones, so the order is kept.
 */
bool
PrepareGroup(Consumer *consumer)
{
	bool first = !consumer->prepared;

	if (!first && (consumer->sole || Milliseconds() < consumer->claimAt))
		return true;
	for (int at = 0; at < consumer->streamCount; at++)
	{
		const char *stream = consumer->streams[at];

		if (first && !CreateGroup(consumer, stream))
			return false;
		if (!TakeOver(consumer, stream, consumer->sole ? 0 : consumer->minIdle))
			return false;
	}
	if (first)
		consumer->pending = true;
	consumer->prepared = true;
	consumer->claimAt = Milliseconds() + consumer->minIdle / 2;
	return true;
}

/* ----------------------------------------------------------------
 * Reading
 * ----------------------------------------------------------------
 */

/*
 * ReadMessages reads this consumer's pending messages, the oldest first, or else waits
 * for new ones. Returns NULL if the connection is lost. The caller frees the reply.
 */
redisReply *
ReadMessages(Consumer *consumer)
{
	char count[16];
	char wait[24];
	redisReply *reply;
	Words words;

	snprintf(count, sizeof(count), "%d", consumer->common.batch);
	snprintf(wait, sizeof(wait), "%lld", (long long) consumer->wait);
	WordsBegin(&words);
	WordsAdd(&words, "XREADGROUP");
	WordsAdd(&words, "GROUP");
	WordsAdd(&words, consumer->group);
	WordsAdd(&words, consumer->name);
	WordsAdd(&words, "COUNT");
	WordsAdd(&words, count);
	WordsAdd(&words, "BLOCK");
	WordsAdd(&words, wait);
	WordsAdd(&words, "STREAMS");
	for (int at = 0; at < consumer->streamCount; at++)
		WordsAdd(&words, consumer->streams[at]);
	for (int at = 0; at < consumer->streamCount; at++)
		WordsAdd(&words, consumer->pending ? "0" : ">");
	reply = RedisAsk(&consumer->redis, &words, consumer->wait);
	WordsFree(&words);

	if (reply == NULL || (reply->type != REDIS_REPLY_ARRAY && reply->type != REDIS_REPLY_NIL))
	{
		(void) Refused(consumer, reply);
		return NULL;
	}
	RedisWorked(&consumer->redis);
	return reply;
}

/*
 * CountMessages returns the number of messages in a read, over all streams.
 */
int
CountMessages(const redisReply *reply)
{
	size_t count = 0;

	for (size_t at = 0; at < reply->elements; at++)
		count += reply->element[at]->element[1]->elements;
	return (int) count;
}

/*
 * NextMessage finds the message with that number, from 0 on. Returns false if there are
 * fewer. The message is valid until the reply is freed.
 */
bool
NextMessage(const redisReply *reply, int number, Message *message)
{
	for (size_t at = 0; at < reply->elements; at++)
	{
		const redisReply *stream = reply->element[at];
		const redisReply *entries = stream->element[1];

		if ((size_t) number < entries->elements)
		{
			message->stream = stream->element[0]->str;
			message->entry = entries->element[number]->element[0]->str;
			message->fields = entries->element[number]->element[1];
			return true;
		}
		number -= (int) entries->elements;
	}
	return false;
}

/*
 * MessageField returns a field of a message, or NULL without a field of that name.
 */
const char *
MessageField(const Message *message, const char *name)
{
	for (size_t at = 0; at + 1 < message->fields->elements; at += 2)
		if (strcmp(message->fields->element[at]->str, name) == 0)
			return message->fields->element[at + 1]->str;
	return NULL;
}

/* ----------------------------------------------------------------
 * Acknowledging
 * ----------------------------------------------------------------
 */

/*
 * Expect reads that many replies. Returns false if the connection is lost, or a reply
 * is an error.
 */
static bool
Expect(Consumer *consumer, int count)
{
	for (int at = 0; at < count; at++)
	{
		redisReply *reply = RedisReply(&consumer->redis);

		if (reply == NULL || reply->type == REDIS_REPLY_ERROR)
			return Refused(consumer, reply);
		freeReplyObject(reply);
	}
	return true;
}

/*
 * AcknowledgeMessages acknowledges the first "count" messages of a read, by one command
 * per stream. Returns false if the connection is lost: Redis redelivers the messages,
 * and once() recognises them.
 */
bool
AcknowledgeMessages(Consumer *consumer, const redisReply *reply, int count)
{
	const char *stream = NULL;
	int commands = 0;
	Message message;
	Words words;

	WordsBegin(&words);
	for (int at = 0; at < count && NextMessage(reply, at, &message); at++)
	{
		if (message.stream != stream)
		{
			if (stream != NULL)
				RedisAppend(&consumer->redis, &words);
			stream = message.stream;
			commands++;
			words.count = 0;
			WordsAdd(&words, "XACK");
			WordsAdd(&words, stream);
			WordsAdd(&words, consumer->group);
		}
		WordsAdd(&words, message.entry);
	}
	if (stream != NULL)
		RedisAppend(&consumer->redis, &words);
	WordsFree(&words);
	if (commands > 0 && !RedisFlush(&consumer->redis))
		return Refused(consumer, NULL);
	return Expect(consumer, commands);
}

/*
 * MoveToDeadStream moves a message to the dead stream, with the reason: an operator can
 * inspect it there, and add it to its stream again. Returns false if the connection is
 * lost; then the message can be in the dead stream twice.
 */
bool
MoveToDeadStream(Consumer *consumer, const Message *message, const char *error)
{
	char *deadStream = malloc(strlen(message->stream) + sizeof(BURIED));
	Words words;
	bool moved;

	if (deadStream == NULL)
		return false;
	strcat(strcpy(deadStream, message->stream), BURIED);
	WordsBegin(&words);
	WordsAdd(&words, "XADD");
	WordsAdd(&words, deadStream);
	WordsAdd(&words, "*");
	for (size_t at = 0; at < message->fields->elements; at++)
		WordsAddBytes(&words, message->fields->element[at]->str, message->fields->element[at]->len);
	WordsAdd(&words, "dead-entry");
	WordsAdd(&words, message->entry);
	WordsAdd(&words, "dead-group");
	WordsAdd(&words, consumer->group);
	WordsAdd(&words, "dead-error");
	WordsAdd(&words, error);
	RedisAppend(&consumer->redis, &words);
	WordsFree(&words);

	moved = RedisFlush(&consumer->redis) ? Expect(consumer, 1) : Refused(consumer, NULL);
	if (moved)
	{
		consumer->dead++;
		LogInfo("%s %s: moved to %s", message->stream, message->entry, deadStream);
	}
	free(deadStream);
	return moved;
}
