/*-------------------------------------------------------------------------
 *
 * outboxerrors.c
 *	  The errors of publishing and delivery that users see, one function each.
 *
 * They follow the rules of errors.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/regproc.h"

#include "errors.h"
#include "outboxerrors.h"

/*
 * ErrorBatchLost reports a batch that is not, or no longer, the one that is out.
 * Unlike a lost claim it does not doom the transaction: nothing was changed, and
 * the events will be given again to somebody who deduplicates.
 */
void
ErrorBatchLost(const text *subscription, int64 batch)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_BATCH_LOST),
			 errmsg("this batch is not the current one of its subscription"),
			 errdetail("Subscription \"%s\", batch %lld.", text_to_cstring(subscription),
					   (long long) batch),
			 errhint("Call idempotency.fetch() for the next batch; to keep one longer, pass a "
					 "longer lease or call idempotency.extend().")));
}

/*
 * ErrorEventNotInBatch reports a nack() of an event that the batch does not
 * have, or no longer has.
 */
void
ErrorEventNotInBatch(const text *subscription, int64 batch)
{
	ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("event is not in the batch"),
					errdetail("Subscription \"%s\", batch %lld.", text_to_cstring(subscription),
							  (long long) batch),
					errhint("Pass the id of an event that the batch brought, once; an event that "
							"waits behind one that failed has left the batch with it.")));
}

/*
 * ErrorFetchSnapshot reports a fetch() in a transaction that does not see what
 * was published since it began.
 */
void
ErrorFetchSnapshot(void)
{
	ereport(ERROR, (errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
					errmsg("events are delivered in READ COMMITTED only"),
					errdetail("A fixed snapshot does not show what was published after it."),
					errhint("Use SET TRANSACTION ISOLATION LEVEL READ COMMITTED.")));
}

/*
 * ErrorPositionChanged reports a position that somebody has changed without the
 * subscription's lock.
 */
void
ErrorPositionChanged(const text *subscription)
{
	ereport(ERROR, (errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
					errmsg("position of a subscription was changed by a concurrent transaction"),
					errdetail("Subscription \"%s\".", text_to_cstring(subscription)),
					errhint("Retry the transaction.")));
}

/*
 * ErrorNotSubscriptionOwner reports a caller who is no member of the owner.
 */
void
ErrorNotSubscriptionOwner(const text *subscription, const char *owner)
{
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for subscription \"%s\"", text_to_cstring(subscription)),
			 errdetail("Its owner is \"%s\".", owner),
			 errhint("Call as a role that has the privileges of the owner.")));
}

/*
 * ErrorOwnerForbidden reports an owner that the caller cannot become.
 */
void
ErrorOwnerForbidden(const char *owner)
{
	ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					errmsg("must be a member of role \"%s\" to let it own a subscription", owner),
					errhint("Leave out the owner, or let a member of that role subscribe.")));
}

/*
 * ErrorOwnerSuperuser reports that a handler would run as a superuser.
 */
void
ErrorOwnerSuperuser(const char *owner)
{
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("a subscription with a handler must not be owned by a superuser"),
			 errdetail("A background worker would run the handler as \"%s\".", owner),
			 errhint("Pass an owner that has the rights that the handler needs, and no more.")));
}

/*
 * ErrorOwnerNoLogin reports an owner as whom no worker could connect.
 */
void
ErrorOwnerNoLogin(const char *owner)
{
	ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					errmsg("role \"%s\" cannot own a subscription with a handler", owner),
					errdetail("It may not log in, and this server lets no worker connect as it."),
					errhint("Use ALTER ROLE ... LOGIN; without a password nobody else gets in.")));
}

/*
 * ErrorNoSubscription reports a name that nobody has subscribed under.
 */
void
ErrorNoSubscription(const text *subscription)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_UNDEFINED_OBJECT),
		 errmsg("subscription \"%s\" does not exist", text_to_cstring(subscription)),
		 errhint("Make it with idempotency.subscribe(); idempotency.subscriptions lists all.")));
}

/*
 * ErrorEventHandlerSignature reports a handler that could not take an event.
 */
void
ErrorEventHandlerSignature(Oid handler)
{
	ereport(ERROR, (errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
					errmsg("function %s cannot handle events", format_procedure(handler)),
					errhint("A handler takes one idempotency.event and returns void.")));
}

/*
 * ErrorHasHandler reports a subscription that workers serve.
 */
void
ErrorHasHandler(const text *subscription, const char *handler)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("subscription \"%s\" has a handler", text_to_cstring(subscription)),
					errdetail("Background workers give its events to %s.", handler),
					errhint("Subscribe again without a handler to fetch them.")));
}

/*
 * ErrorNumbersBehind reports a sequence that did not come along with the positions:
 * events that are published now would count as delivered.
 */
void
ErrorNumbersBehind(const text *subscription, int64 passed, int64 last)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
		 errmsg("sequence idempotency.outbox_seq is behind subscription \"%s\"",
				text_to_cstring(subscription)),
		 errdetail("The subscription came from elsewhere and has passed event %lld; the last "
				   "number given out here is %lld.",
				   (long long) passed, (long long) last),
		 errhint("Before anything is published, use SELECT "
				 "setval('idempotency.outbox_seq', ...) with the last number of the server that "
				 "the rows came from.")));
}

/*
 * ErrorSubscriptionBusy reports that somebody else's transaction holds the
 * subscription.
 */
void
ErrorSubscriptionBusy(const text *subscription)
{
	ereport(ERROR, (errcode(ERRCODE_LOCK_NOT_AVAILABLE),
					errmsg("subscription \"%s\" is in use", text_to_cstring(subscription)),
					errdetail("Another transaction that fetched or acknowledged is still open."),
					errhint("Try again, or set idempotency.wait higher.")));
}

/*
 * ErrorEventHandlerMissing reports a handler that was dropped, or whose arguments
 * were changed.
 */
void
ErrorEventHandlerMissing(const char *handler)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_FUNCTION), errmsg("handler %s does not exist", handler),
			 errhint("Make it again, or subscribe with another one.")));
}

/*
 * ErrorEventHandlerOwner reports a handler whose body can be replaced by a role that
 * cannot act as the owner of the subscription.
 */
void
ErrorEventHandlerOwner(Oid handler, Oid functionOwner, Oid owner)
{
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("owner \"%s\" of handler %s does not have the privileges of role \"%s\"",
					GetUserNameFromId(functionOwner, false), format_procedure_qualified(handler),
					GetUserNameFromId(owner, false)),
			 errdetail("The owner of a function can replace its body at any time, and the handler "
					   "runs with the privileges of the subscription's owner."),
			 errhint("Use ALTER FUNCTION ... OWNER TO to make the subscription's owner the owner "
					 "of the handler.")));
}

/*
 * ErrorEventHandlerReplaced reports a handler that was replaced while a batch was
 * given to it.
 */
void
ErrorEventHandlerReplaced(const char *handler)
{
	ereport(ERROR, (errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
					errmsg("handler %s was replaced by a concurrent transaction", handler)));
}

/*
 * WarnNoRelayPlace warns that workers cannot serve the subscription yet.
 */
void
WarnNoRelayPlace(int places)
{
	ereport(WARNING, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					  errmsg("the server has no place left for a subscription with a handler"),
					  errdetail("Its handler is called when one of %d places is given up.", places),
					  errhint("Increase idempotency.relay_subscriptions and restart the server.")));
}

/*
 * ErrorPublishersBusy reports a transaction that has been in the middle of
 * inserting an event, or of changing the outbox, for too long.
 */
void
ErrorPublishersBusy(void)
{
	ereport(ERROR, (errcode(ERRCODE_LOCK_NOT_AVAILABLE),
					errmsg("could not wait for the events that are just being published"),
					errdetail("A transaction has held a lock on an index of idempotency.outbox for "
							  "longer than idempotency.wait."),
					errhint("Try again, or end that transaction; see pg_locks.")));
}

/*
 * ErrorReaperBusy reports a transaction that has called reap() and is still open.
 */
void
ErrorReaperBusy(void)
{
	ereport(ERROR, (errcode(ERRCODE_LOCK_NOT_AVAILABLE),
					errmsg("could not wait for the events that are just being removed"),
					errdetail("A transaction that called idempotency.reap() is open for longer "
							  "than idempotency.wait."),
					errhint("Try again, or end that transaction; see pg_locks.")));
}
