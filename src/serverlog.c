/*-------------------------------------------------------------------------
 *
 * serverlog.c
 *	  What only the server's log is told, one function each.
 *
 * It is about things that nobody is waiting for an answer to, found by workers mostly.
 * None of these functions takes a lock or looks at a table.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/fmgrprotos.h"

#include "serverlog.h"

/*
 * LogStatsFull says in the log, and to nobody else, that events of the current
 * database are not counted.
 */
void
LogStatsFull(int databases)
{
	ereport(LOG_SERVER_ONLY, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
							  errmsg("idempotency does not count the events of further databases"),
							  errdetail("It keeps the counters of %d databases.", databases),
							  errhint("A place is given back when its database is dropped.")));
}

/*
 * LogReaperRefused says in the log that the tables of a database are not as the
 * library knows them.  "why" is the error that they raised.
 */
void
LogReaperRefused(int level, const char *database, const ErrorData *why)
{
	ereport(level, (errcode(why->sqlerrcode),
					errmsg("idempotency reaper leaves database \"%s\" alone", database),
					why->detail == NULL ? errdetail_internal("%s", why->message)
										: errdetail_internal("%s: %s", why->message, why->detail),
					why->hint == NULL ? 0 : errhint("%s", why->hint)));
}

/*
 * LogNoWorkerSlot says in the log that no worker can be started now.
 */
void
LogNoWorkerSlot(void)
{
	ereport(LOG, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				  errmsg("no background worker slot is free for the idempotency reaper"),
				  errhint("Expired keys are removed when one is. Consider increasing "
						  "max_worker_processes.")));
}

/*
 * LogEventsDropped says in the log that a subscription was moved on, since it was not
 * read for longer than it allows: up to the number "upto", "passed" of them.
 */
void
LogEventsDropped(const text *subscription, int64 passed, int64 upto)
{
	ereport(LOG,
			(errmsg("subscription \"%s\" was moved past events that are older than its max_lag",
					text_to_cstring(subscription)),
			 errdetail("Numbers passed over, as many events at most: %lld; the last of them: %lld.",
					   (long long) passed, (long long) upto)));
}

/*
 * LogRelayProblem says in the log that a subscription cannot be served.
 */
void
LogRelayProblem(const char *database, int64 number, const char *problem)
{
	ereport(LOG, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				  errmsg("idempotency relay cannot serve subscription %lld of database \"%s\"",
						 (long long) number, database),
				  errdetail_internal("%s", problem),
				  errhint("It tries again, less and less often. Calling idempotency.subscribe() "
						  "again lets it try at once.")));
}

/*
 * LogDeadLetter says in the log that an event is not given to a handler any more.
 */
void
LogDeadLetter(const text *subscription, const Event *event, const text *error)
{
	const char *id = DatumGetCString(DirectFunctionCall1(uuid_out, event->values[EVENT_ID]));

	ereport(LOG, (errmsg("event %s of subscription \"%s\" is a dead letter now", id,
						 text_to_cstring(subscription)),
				  errdetail_internal("%s", text_to_cstring(error)),
				  errhint("idempotency.redrive() gives it once more.")));
}

/*
 * LogNoRelaySlot says in the log that no worker can be started now.
 */
void
LogNoRelaySlot(void)
{
	ereport(LOG, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				  errmsg("no background worker slot is free for the idempotency relay"),
				  errhint("Events wait until one is. Consider increasing max_worker_processes.")));
}

/*
 * LogRelayFull says in the log that there are too many subscriptions.
 */
void
LogRelayFull(int subscriptions)
{
	ereport(LOG, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				  errmsg("idempotency relay does not serve further subscriptions"),
				  errdetail("It has room for %d, which is idempotency.relay_subscriptions.",
							subscriptions),
				  errhint("Increase idempotency.relay_subscriptions and restart the server.")));
}
