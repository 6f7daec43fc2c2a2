/*-------------------------------------------------------------------------
 *
 * consumer.h
 *	  Shared declarations of the consumer.
 *
 *-------------------------------------------------------------------------
 */
#ifndef CONSUMER_H
#define CONSUMER_H

#include "arguments.h"
#include "postgres.h"
#include "redis.h"

#define MOST_STREAMS 64

typedef struct Consumer
{
	Common common;
	Postgres postgres;
	Redis redis;

	const char *streams[MOST_STREAMS];
	int streamCount;
	const char *group;
	const char *name;	  /* of this consumer in the group */
	const char *from;	  /* the start of a new group */
	const char *function; /* as given on the command line */
	char *call;			  /* the statement that calls it */
	int64_t wait;		  /* of a read, in milliseconds */
	int64_t minIdle;	  /* after which other consumers' messages are claimed, in ms */
	bool sole;			  /* no other consumer in the group */
	int maxAttempts;

	bool pending;	 /* read this consumer's pending messages */
	bool prepared;	 /* the group exists, on this connection */
	int64_t claimAt; /* time of the next claim of idle messages */

	long long handled;
	long long seenBefore;
	long long dead;
} Consumer;

/* One entry of a stream. */
typedef struct Message
{
	const char *stream;
	const char *entry;		  /* its id in the stream */
	const redisReply *fields; /* names and values */
} Message;

/* group.c: the Redis side */
extern bool PrepareGroup(Consumer *consumer);
extern redisReply *ReadMessages(Consumer *consumer);
extern bool AcknowledgeMessages(Consumer *consumer, const redisReply *reply, int count);
extern bool MoveToDeadStream(Consumer *consumer, const Message *message, const char *error);
extern int CountMessages(const redisReply *reply);
extern bool NextMessage(const redisReply *reply, int number, Message *message);
extern const char *MessageField(const Message *message, const char *name);

/* effect.c: the PostgreSQL side */
extern bool FindFunction(Consumer *consumer);
extern int HandleMessages(Consumer *consumer, const redisReply *reply);

#endif /* CONSUMER_H */
