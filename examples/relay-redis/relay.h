/*-------------------------------------------------------------------------
 *
 * relay.h
 *	  What the rooms of the relay share.
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
	const char *stream; /* %t in it stands for the topic */
	int pipeline;		/* XADDs in one MULTI */
	const char *maxlen; /* of a stream, NULL: no limit */
	int64_t wait;		/* of a fetch, in milliseconds */
	int64_t lease;		/* of a batch, in milliseconds */

	/* The batch in hand. */
	PGresult *events; /* NULL: none */
	int count;
	char batch[24];	  /* its number */
	bool ours;		  /* as far as is known */
	int64_t extendAt; /* when its lease wants to be extended */

	long long delivered;
} Relay;

/* batch.c: the side of PostgreSQL */
extern bool FetchBatch(Relay *relay);
extern bool ExtendBatch(Relay *relay);
extern bool ParkEvent(Relay *relay, int row, const char *error);
extern bool AcknowledgeBatch(Relay *relay);
extern void GiveBackBatch(Relay *relay);
extern void ForgetBatch(Relay *relay);
extern const char *EventField(const Relay *relay, int row, const char *column);

/* add.c: the side of Redis */
extern bool AddBatch(Relay *relay);

#endif /* RELAY_H */
