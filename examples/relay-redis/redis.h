/*-------------------------------------------------------------------------
 *
 * redis.h
 *	  A connection to Redis that reconnects.
 *
 *-------------------------------------------------------------------------
 */
#ifndef REDIS_CONNECTION_H
#define REDIS_CONNECTION_H

#include <hiredis/hiredis.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "process.h"

typedef struct Redis
{
	char *path; /* of a Unix socket; NULL: host and port apply */
	char *host;
	int port;
	char *user;		/* NULL: the default user */
	char *database; /* number; NULL: 0 */
	const char *name;
	int64_t timeout;	   /* of an answer, in milliseconds */
	redisContext *context; /* NULL: not connected */
	Backoff backoff;
} Redis;

/* The words of a command. */
typedef struct Words
{
	const char **words;
	size_t *lengths;
	int count;
	int capacity;
} Words;

/* The result of a wait for a reply. */
typedef enum Received
{
	RECEIVED_REPLY,
	RECEIVED_NOTHING, /* not yet */
	RECEIVED_LOST	  /* the connection is lost */
} Received;

extern bool RedisParse(Redis *redis, const char *url);
extern bool RedisReady(Redis *redis);
extern void RedisClose(Redis *redis);
extern void RedisLose(Redis *redis, const char *why);
extern void RedisWorked(Redis *redis);

extern void WordsBegin(Words *words);
extern void WordsAdd(Words *words, const char *word);
extern void WordsAddBytes(Words *words, const char *word, size_t length);
extern void WordsFree(Words *words);

extern void RedisAppend(Redis *redis, const Words *words);
extern bool RedisFlush(Redis *redis);
extern Received RedisReceive(Redis *redis, int64_t until, redisReply **reply);
extern redisReply *RedisReply(Redis *redis);
extern redisReply *RedisAsk(Redis *redis, const Words *words, int64_t wait);
extern redisReply *RedisAskWords(Redis *redis, ...) __attribute__((sentinel));

#endif /* REDIS_CONNECTION_H */
