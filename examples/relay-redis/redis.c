/*-------------------------------------------------------------------------
 *
 * redis.c
 *	  A connection to Redis that reconnects.
 *
 * This file never repeats a command: the caller must decide what a lost reply means.
 *
 *-------------------------------------------------------------------------
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "redis.h"

/* ----------------------------------------------------------------
 * Where Redis is
 * ----------------------------------------------------------------
 */

/*
 * IsNumber returns whether the text is a number from least to most.
 */
static bool
IsNumber(const char *text, long least, long most)
{
	char *end;
	long number = strtol(text, &end, 10);

	return *text >= '0' && *text <= '9' && *end == '\0' && number >= least && number <= most;
}

/*
 * RedisParse parses unix:///path or redis://[user@]host[:port][/database]. An IPv6
 * address is in brackets. The password comes from the environment, where ps does not
 * show it. Returns false if the text is neither.
 */
bool
RedisParse(Redis *redis, const char *url)
{
	char *rest;
	char *mark;

	if (strncmp(url, "unix://", 7) == 0)
	{
		redis->path = strdup(url + 7);
		return redis->path[0] == '/';
	}
	if (strncmp(url, "redis://", 8) != 0)
		return false;
	rest = strdup(url + 8);

	mark = strchr(rest, '/');
	if (mark != NULL)
	{
		*mark = '\0';
		if (mark[1] != '\0')
			redis->database = mark + 1;
	}
	mark = strrchr(rest, '@');
	if (mark != NULL)
	{
		*mark = '\0';
		redis->user = rest;
		rest = mark + 1;
	}
	mark = strrchr(rest, ':');
	redis->port = 6379;
	if (mark != NULL && strchr(mark, ']') == NULL)
	{
		*mark = '\0';
		if (!IsNumber(mark + 1, 1, 65535))
			return false;
		redis->port = atoi(mark + 1);
	}
	if (rest[0] == '[' && rest[strlen(rest) - 1] == ']')
	{
		rest[strlen(rest) - 1] = '\0';
		rest++;
	}
	redis->host = rest;
	return rest[0] != '\0' && (redis->user == NULL || redis->user[0] != '\0') &&
		   (redis->database == NULL || IsNumber(redis->database, 0, 1000000));
}

/* ----------------------------------------------------------------
 * Connecting
 * ----------------------------------------------------------------
 */

/*
 * RedisClose ends the connection, if there is one.
 */
void
RedisClose(Redis *redis)
{
	if (redis->context != NULL)
		redisFree(redis->context);
	redis->context = NULL;
}

/*
 * RedisLose ends a connection that is unusable.
 */
void
RedisLose(Redis *redis, const char *why)
{
	LogInfo("Redis: %s", why);
	BackoffFailed(&redis->backoff);
	RedisClose(redis);
}

/*
 * RedisWorked records that a command succeeded, which is more than an accepted
 * connection: the next failure counts as the first again.
 */
void
RedisWorked(Redis *redis)
{
	BackoffWorked(&redis->backoff);
}

/*
 * HandshakeReply reads the reply to a command on a new connection, and frees it. Returns false,
 * and ends the connection, if there is no reply, or it is an error.
 */
static bool
HandshakeReply(Redis *redis, redisReply *reply)
{
	bool agrees = reply != NULL && reply->type != REDIS_REPLY_ERROR;

	if (reply != NULL && !agrees)
		RedisLose(redis, reply->str);
	if (reply != NULL)
		freeReplyObject(reply);
	return agrees;
}

/*
 * Handshake authenticates, and checks whether Redis is ready: while it loads its data,
 * it already accepts connections.
 */
static bool
Handshake(Redis *redis)
{
	const char *password = getenv("REDISCLI_AUTH");
	const char *database = redis->database != NULL ? redis->database : "0";

	if (password != NULL &&
		!HandshakeReply(redis, redis->user != NULL
								   ? RedisAskWords(redis, "AUTH", redis->user, password, NULL)
								   : RedisAskWords(redis, "AUTH", password, NULL)))
		return false;
	return HandshakeReply(redis, RedisAskWords(redis, "CLIENT", "SETNAME", redis->name, NULL)) &&
		   HandshakeReply(redis, RedisAskWords(redis, "SELECT", database, NULL)) &&
		   HandshakeReply(redis, RedisAskWords(redis, "PING", NULL));
}

/*
 * Connect tries to connect once, and prints the error.
 */
static void
Connect(Redis *redis)
{
	struct timeval limit = {redis->timeout / 1000, redis->timeout % 1000 * 1000};

	redis->context = redis->path != NULL ? redisConnectUnixWithTimeout(redis->path, limit)
										 : redisConnectWithTimeout(redis->host, redis->port, limit);
	if (redis->context == NULL || redis->context->err != 0)
	{
		RedisLose(redis, redis->context != NULL ? redis->context->errstr : "out of memory");
		return;
	}
	(void) redisSetTimeout(redis->context, limit);
	if (redis->path == NULL)
		(void) redisEnableKeepAlive(redis->context);
	if (Handshake(redis) && redis->backoff.failures > 0)
		LogInfo("Redis: connected again");
}

/*
 * RedisReady connects if needed, and retries until it succeeds. Returns false if the
 * program must exit.
 */
bool
RedisReady(Redis *redis)
{
	while (redis->context == NULL)
	{
		if (!BackoffSleep(&redis->backoff))
			return false;
		Connect(redis);
	}
	return true;
}

/* ----------------------------------------------------------------
 * Commands
 * ----------------------------------------------------------------
 */

void
WordsBegin(Words *words)
{
	memset(words, 0, sizeof(*words));
}

/*
 * WordsAddBytes adds a word, which must stay valid until the command was appended.
 */
void
WordsAddBytes(Words *words, const char *word, size_t length)
{
	if (words->count == words->capacity)
	{
		words->capacity = words->capacity * 2 + 32;
		words->words = realloc(words->words, (size_t) words->capacity * sizeof(*words->words));
		words->lengths =
			realloc(words->lengths, (size_t) words->capacity * sizeof(*words->lengths));
		if (words->words == NULL || words->lengths == NULL)
		{
			LogInfo("out of memory");
			exit(EXIT_REFUSED);
		}
	}
	words->words[words->count] = word;
	words->lengths[words->count++] = length;
}

void
WordsAdd(Words *words, const char *word)
{
	WordsAddBytes(words, word, strlen(word));
}

void
WordsFree(Words *words)
{
	free(words->words);
	free(words->lengths);
	WordsBegin(words);
}

/*
 * RedisAppend adds a command to those that RedisFlush sends.
 */
void
RedisAppend(Redis *redis, const Words *words)
{
	if (redis->context != NULL && redisAppendCommandArgv(redis->context, words->count, words->words,
														 words->lengths) != REDIS_OK)
		RedisLose(redis, redis->context->errstr);
}

/*
 * RedisFlush sends the appended commands. Returns false if the connection is lost.
 */
bool
RedisFlush(Redis *redis)
{
	int done = 0;

	while (redis->context != NULL && !done)
		if (redisBufferWrite(redis->context, &done) != REDIS_OK)
			RedisLose(redis, redis->context->errstr);
	return redis->context != NULL;
}

/*
 * RedisReceive waits for the next reply until that time.  The caller frees it.
 */
Received
RedisReceive(Redis *redis, int64_t until, redisReply **reply)
{
	void *next = NULL;

	*reply = NULL;
	while (redis->context != NULL)
	{
		if (redisGetReplyFromReader(redis->context, &next) != REDIS_OK)
			RedisLose(redis, redis->context->errstr);
		else if (next != NULL)
		{
			*reply = next;
			return RECEIVED_REPLY;
		}
		else if (Await(redis->context->fd, POLLIN, until, false) == AWAITED_LATE)
			return RECEIVED_NOTHING;
		else if (redisBufferRead(redis->context) != REDIS_OK)
			RedisLose(redis, redis->context->errstr);
	}
	return RECEIVED_LOST;
}

/*
 * Wait waits that long for the next reply; after that the connection counts as lost.
 * Returns NULL if it is lost.
 */
static redisReply *
Wait(Redis *redis, int64_t within)
{
	redisReply *reply;

	if (RedisReceive(redis, Milliseconds() + within, &reply) == RECEIVED_NOTHING)
		RedisLose(redis, "no answer in time");
	return reply;
}

/*
 * RedisReply returns the next reply, which the caller frees; NULL if the connection is
 * lost.
 */
redisReply *
RedisReply(Redis *redis)
{
	return Wait(redis, redis->timeout);
}

/*
 * RedisAsk sends a command and waits for its reply, which the caller frees. "wait" is
 * how long Redis can block. Returns NULL if the connection is lost.
 */
redisReply *
RedisAsk(Redis *redis, const Words *words, int64_t wait)
{
	RedisAppend(redis, words);
	return RedisFlush(redis) ? Wait(redis, wait + redis->timeout) : NULL;
}

/*
 * RedisAskWords is RedisAsk for a command whose words are the arguments, followed by
 * NULL.
 */
redisReply *
RedisAskWords(Redis *redis, ...)
{
	va_list arguments;
	const char *word;
	Words words;
	redisReply *reply;

	WordsBegin(&words);
	va_start(arguments, redis);
	while ((word = va_arg(arguments, const char *)) != NULL)
		WordsAdd(&words, word);
	va_end(arguments);
	reply = RedisAsk(redis, &words, 0);
	WordsFree(&words);
	return reply;
}
