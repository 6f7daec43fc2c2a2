/*-------------------------------------------------------------------------
 *
 * consumer.h
 *	  What the rooms of the consumer share.
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
	const char *name;	  /* ours, in the group */
	const char *from;	  /* where a new group begins */
	const char *function; /* to call, as given */
	char *call;			  /* the statement that calls it */
	int64_t wait;		  /* of a read, in milliseconds */
	int64_t minIdle;	  /* after which another consumer's messages are taken over */
	bool sole;			  /* there is no other consumer */
	int maxAttempts;

	bool pending;	 /* read what was delivered to us already, and not acknowledged */
	bool prepared;	 /* the group is there, on this connection */
	int64_t claimAt; /* when to look for what others left */

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

/* group.c: the side of Redis */
extern bool PrepareGroup(Consumer *consumer);
extern redisReply *ReadMessages(Consumer *consumer);
extern bool AcknowledgeMessages(Consumer *consumer, const redisReply *reply, int count);
extern bool BuryMessage(Consumer *consumer, const Message *message, const char *error);
extern int CountMessages(const redisReply *reply);
extern bool NextMessage(const redisReply *reply, int number, Message *message);
extern const char *MessageField(const Message *message, const char *name);

/* effect.c: the side of PostgreSQL */
extern bool FindFunction(Consumer *consumer);
extern int HandleMessages(Consumer *consumer, const redisReply *reply);

#endif /* CONSUMER_H */
