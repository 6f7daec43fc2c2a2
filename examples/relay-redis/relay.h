/*-------------------------------------------------------------------------
 *
 * relay.h
 *	  Shared declarations of the relay.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_H
#define RELAY_H

#include "arguments.h"
#include "postgres.h"
#include "redis.h"

typedef struct Relay
{
	Common common;
	Postgres postgres;
	Redis redis;

	const char *subscription;
	const char *stream; /* %t is replaced by the topic */
	int pipeline;		/* XADDs in one MULTI */
	const char *maxlen; /* of a stream, NULL: no limit */
	int64_t wait;		/* of a fetch, in milliseconds */
	int64_t lease;		/* of a batch, in milliseconds */

	/* The current batch. */
	PGresult *events; /* NULL: none */
	int count;
	bool *left; /* which of them have left it after NackEvent() */
	char batch[24];	  /* batch number */
	bool owned;		  /* false after an error IK408 */
	int64_t extendAt; /* time of the next extension */

	long long delivered;
} Relay;

/* batch.c: the PostgreSQL side */
extern bool FetchBatch(Relay *relay);
extern bool ExtendBatch(Relay *relay);
extern bool NackEvent(Relay *relay, int row, const char *error);
extern bool AcknowledgeBatch(Relay *relay);
extern void ReturnBatch(Relay *relay);
extern void DiscardBatch(Relay *relay);
extern const char *EventField(const Relay *relay, int row, const char *column);

/* add.c: the Redis side */
extern bool AddBatch(Relay *relay);

#endif /* RELAY_H */
