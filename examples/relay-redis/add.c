/*-------------------------------------------------------------------------
 *
 * add.c
 *	  Adds the batch to Redis Streams.
 *
 * The batch goes in chunks, each one MULTI and one EXEC sent in one go, and the next
 * one when the answer is there.  Were the commands of a chunk on their own, one that
 * Redis refuses (out of memory, say) might be overtaken by a later one of its
 * aggregate, and be late for ever.
 *
 * Events may be added more than once, whole batches of them, but the first copies
 * stand in order: every sender begins where all before is in the stream.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relay.h"

/* A chunk ends when it has so many bytes: Redis keeps it in memory until EXEC. */
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
		Say("out of memory");
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
 * AppendEvent appends the XADD of one event.  Returns its bytes, more or less.
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
 * SendChunk sends the next events from the row "from".  Returns the row after them;
 * whether they arrived, the replies tell.
 */
static int
SendChunk(Relay *relay, int from)
{
	size_t bytes = 0;
	int row = from;

	AppendCommand(relay, "MULTI");
	while (row < relay->count && row - from < relay->pipeline && bytes < CHUNK_BYTES)
		bytes += AppendEvent(relay, row++);
	AppendCommand(relay, "EXEC");
	(void) RedisFlush(&relay->redis);
	return row;
}

/* ----------------------------------------------------------------
 * Replies
 * ----------------------------------------------------------------
 */

/*
 * NextReply waits for the next reply, and extends the lease meanwhile.  The caller
 * frees it.  Returns NULL, and the connection is lost, if none comes in time, or the
 * batch is not ours any more.
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
 * ParkRefused parks the events that EXEC could not add: those whose stream's name is
 * that of something else, say.  "executed" has a reply for each event from "from" on.
 * Returns false if that did not work.
 */
static bool
ParkRefused(Relay *relay, int from, const redisReply *executed)
{
	for (size_t at = 0; at < executed->elements; at++)
		if (executed->element[at]->type == REDIS_REPLY_ERROR &&
			!ParkEvent(relay, from + (int) at, executed->element[at]->str))
			return false;
	return true;
}

/*
 * Refuse ends a connection on which Redis refused a whole chunk: it is full, or a
 * replica now, or has no rights for us.  Another connection, or another time, may do.
 */
static void
Refuse(Relay *relay, const char *first, const redisReply *executed)
{
	const char *why = executed->type == REDIS_REPLY_ERROR ? executed->str : "nothing was executed";

	RedisLose(&relay->redis, first[0] != '\0' ? first : why);
}

/*
 * ReceiveChunk reads the replies to the events from "from" to "next".  Returns
 * whether each of them is in its stream now, or parked.
 */
static bool
ReceiveChunk(Relay *relay, int from, int next)
{
	char first[256] = "";
	redisReply *reply;
	bool added;

	/* MULTI, and the commands: what is wrong with one of them spoils EXEC. */
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
		added = ParkRefused(relay, from, reply);
	}
	freeReplyObject(reply);
	return added;
}

/*
 * AddBatch adds the batch in hand.  Returns whether each event is in its stream now,
 * or parked; if not, some may be.
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
		Note("batch %s: %d of %d added", relay->batch, next, relay->count);
	}
	return true;
}
