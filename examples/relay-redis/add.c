/*-------------------------------------------------------------------------
 *
 * add.c
 *	  Adds the batch to Redis Streams.
 *
 * The batch is sent in chunks, each with one MULTI and one EXEC; the next chunk follows
 * after the reply. Without MULTI, a command that Redis refuses (out of memory, say)
 * could be overtaken by a later one of its aggregate, and then stay out of order.
 *
 * Events can be added more than once, whole batches of them, but the first copies are
 * in order: every sender starts with the first event that is not known to be in the
 * stream.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relay.h"

/* A chunk ends when it has that many bytes: Redis keeps it in memory until EXEC. */
#define CHUNK_BYTES (4 * 1024 * 1024)

/* The fields of an entry; those that are NULL are left out. */
static const char *const fields[] = {"id",		"seq",	   "aggregatetype", "aggregateid", "type",
									 "payload", "headers", "published_at",	NULL};

/* ----------------------------------------------------------------
 * Sending
 * ----------------------------------------------------------------
 */

/*
 * StreamOf returns the name of the stream for a topic, which the caller frees.
 */
static char *
StreamOf(const Relay *relay, const char *topic)
{
	char *name = malloc(strlen(relay->stream) * (strlen(topic) + 1) + 1);
	char *end = name;

	if (name == NULL)
	{
		LogInfo("out of memory");
		exit(EXIT_REFUSED);
	}
	for (const char *from = relay->stream; *from != '\0'; from++)
	{
		if (from[0] == '%' && from[1] == 't')
		{
			end = stpcpy(end, topic);
			from++;
		}
		else
			*end++ = *from;
	}
	*end = '\0';
	return name;
}

/*
 * AppendCommand appends a command of one word.
 */
static void
AppendCommand(Relay *relay, const char *word)
{
	Words words;

	WordsBegin(&words);
	WordsAdd(&words, word);
	RedisAppend(&relay->redis, &words);
	WordsFree(&words);
}

/*
 * AppendEvent appends the XADD of one event. Returns its approximate size in bytes.
 */
static size_t
AppendEvent(Relay *relay, int row)
{
	char *stream = StreamOf(relay, EventField(relay, row, "aggregatetype"));
	size_t bytes = 0;
	Words words;

	WordsBegin(&words);
	WordsAdd(&words, "XADD");
	WordsAdd(&words, stream);
	if (relay->maxlen != NULL)
	{
		WordsAdd(&words, "MAXLEN");
		WordsAdd(&words, "~");
		WordsAdd(&words, relay->maxlen);
	}
	WordsAdd(&words, "*");
	for (const char *const *field = fields; *field != NULL; field++)
	{
		const char *value = EventField(relay, row, *field);

		if (value == NULL)
			continue;
		WordsAdd(&words, *field);
		WordsAdd(&words, value);
		bytes += words.lengths[words.count - 1];
	}
	RedisAppend(&relay->redis, &words);
	WordsFree(&words);
	free(stream);
	return bytes;
}

/*
 * SendChunk sends the next events from the row "from". Returns the row after them; the
 * replies tell whether they arrived. An event that has left the batch is redelivered after
 * an earlier one, and must not arrive before: a PING takes its place.
 */
static int
SendChunk(Relay *relay, int from)
{
	size_t bytes = 0;
	int row = from;

	AppendCommand(relay, "MULTI");
	while (row < relay->count && row - from < relay->pipeline && bytes < CHUNK_BYTES)
	{
		if (relay->left[row])
			AppendCommand(relay, "PING");
		else
			bytes += AppendEvent(relay, row);
		row++;
	}
	AppendCommand(relay, "EXEC");
	(void) RedisFlush(&relay->redis);
	return row;
}

/* ----------------------------------------------------------------
 * Replies
 * ----------------------------------------------------------------
 */

/*
 * NextReply waits for the next reply, and extends the lease meanwhile. The caller frees
 * the reply. Returns NULL, and the connection is lost, if no reply comes in time, or
 * the batch was lost.
 */
static redisReply *
NextReply(Relay *relay)
{
	int64_t end = Milliseconds() + relay->redis.timeout;
	redisReply *reply;

	for (;;)
	{
		int64_t until = relay->extendAt < end ? relay->extendAt : end;

		if (RedisReceive(&relay->redis, until, &reply) != RECEIVED_NOTHING)
			return reply;
		if (Milliseconds() >= end)
			RedisLose(&relay->redis, "no answer in time");
		else if (!ExtendBatch(relay))
			RedisLose(&relay->redis, "what was under way is left alone");
	}
}

/*
 * NackRefused calls nack for the events that EXEC could not add: for example, because
 * the key of the stream has another type. "executed" has a reply for each event from
 * "from" on. Returns false if that failed.
 */
static bool
NackRefused(Relay *relay, int from, const redisReply *executed)
{
	for (size_t at = 0; at < executed->elements; at++)
		if (executed->element[at]->type == REDIS_REPLY_ERROR && !relay->left[from + (int) at] &&
			!NackEvent(relay, from + (int) at, executed->element[at]->str))
			return false;
	return true;
}

/*
 * Refuse ends a connection on which Redis refused a whole chunk: Redis is full, or a
 * replica, or the user has no permission. Another connection, or a later attempt, can
 * succeed.
 */
static void
Refuse(Relay *relay, const char *first, const redisReply *executed)
{
	const char *why = executed->type == REDIS_REPLY_ERROR ? executed->str : "nothing was executed";

	RedisLose(&relay->redis, first[0] != '\0' ? first : why);
}

/*
 * ReceiveChunk reads the replies to the events from "from" to "next". Returns whether
 * each of them is now in its stream or was returned with nack.
 */
static bool
ReceiveChunk(Relay *relay, int from, int next)
{
	char first[256] = "";
	redisReply *reply;
	bool added;

	/* MULTI, and the commands: an error in one of them makes EXEC fail. */
	for (int at = 0; at < 1 + next - from; at++)
	{
		reply = NextReply(relay);
		if (reply == NULL)
			return false;
		if (reply->type == REDIS_REPLY_ERROR && first[0] == '\0')
			snprintf(first, sizeof(first), "%s", reply->str);
		freeReplyObject(reply);
	}
	reply = NextReply(relay);
	if (reply == NULL)
		return false;
	added = reply->type == REDIS_REPLY_ARRAY && reply->elements == (size_t) (next - from);
	if (!added)
		Refuse(relay, first, reply);
	else
	{
		RedisWorked(&relay->redis);
		added = NackRefused(relay, from, reply);
	}
	freeReplyObject(reply);
	return added;
}

/*
 * AddBatch adds the current batch. Returns whether each event is now in its stream or
 * was returned with nack; if not, some can be.
 */
bool
AddBatch(Relay *relay)
{
	int next;

	for (int from = 0; from < relay->count; from = next)
	{
		if (Milliseconds() >= relay->extendAt && !ExtendBatch(relay))
			return false;
		next = SendChunk(relay, from);
		if (!ReceiveChunk(relay, from, next))
			return false;
		LogDebug("batch %s: %d of %d added", relay->batch, next, relay->count);
	}
	return true;
}
