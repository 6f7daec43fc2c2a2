/*-------------------------------------------------------------------------
 *
 * relay/wakeup.c
 *	  What a commit passes to the relay: the topics of published events, and the
 *	  subscriptions that were added, changed, removed or redriven.
 *
 * Published events request a wakeup, if one is armed for their topics; the README
 * says why no event is missed.  Changes of subscriptions are pending until the
 * commit.  After a rollback to a savepoint none of them is passed, but a survey is
 * requested: a subscription that is known by topics that it does not have gets no wakeup.
 * Published topics survive such a rollback: a worker that finds nothing does no harm.
 * COMMIT PREPARED runs in a backend that knows neither; the survey finds what it commits.
 *
 * Locks: none for a wakeup; the registry's, at commit, if a subscription was changed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"

#include "base/compat.h"
#include "base/guc.h"
#include "base/visits.h"
#include "outbox/notify.h"
#include "relay/registry.h"

/*
 * How many changes a transaction keeps, so that nothing can fail after its commit.  One
 * with more requests a survey.
 */
#define CHANGES_MOST 16
#define CHANGES_LOST (CHANGES_MOST + 1)

typedef enum ChangeKind
{
	CHANGE_PUT,
	CHANGE_REMOVED,
	CHANGE_DUE
} ChangeKind;

typedef struct Change
{
	ChangeKind kind;
	int64 number;
	Oid owner;
	TopicSet wants;
} Change;

static bool published = false;
static TopicSet topics; /* of what was published */
static Change changes[CHANGES_MOST];
static int changeCount = 0; /* CHANGES_LOST: none is kept */

/* The slot of this backend's database, or -1, as of a generation of the registry. */
static int mySlot = -1;
static uint32 myGeneration = 0;

/* ----------------------------------------------------------------
 * Wakeups
 * ----------------------------------------------------------------
 */

/*
 * MyDatabase returns this backend's database in the registry, or NULL.
 */
static RelayDatabase *
MyDatabase(void)
{
	uint32 generation = pg_atomic_read_u32(&Registry->generation);

	if (generation != myGeneration)
	{
		pg_read_barrier();
		mySlot = RegistryDatabaseSlot(MyDatabaseId);
		myGeneration = generation;
	}
	return mySlot < 0 ? NULL : &Registry->databases[mySlot];
}

/*
 * RequestWakeup wakes the launcher, if a wakeup is armed for a topic that this transaction
 * has published.  For XACT_EVENT_COMMIT, when others can see the transaction; it cannot
 * fail.
 */
static void
RequestWakeup(void)
{
	RelayDatabase *database = MyDatabase();
	uint64 requested = 0;

	if (database == NULL)
		return;

	/* Others must have been able to see the commit before armed is read. */
	pg_memory_barrier();
	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		uint64 armed = topics.words[word];

		if (armed != 0)
			armed &= pg_atomic_read_u64(&database->armed[word]);
		if (armed != 0)
			armed &= pg_atomic_fetch_and_u64(&database->armed[word], ~armed);
		if (armed != 0)
			(void) pg_atomic_fetch_or_u64(&database->requested[word], armed);
		requested |= armed;
	}
	if (requested != 0)
		RegistryWakeLauncher();
}

/*
 * RelayWakeupArm makes the next commit in the database request a wakeup that publishes
 * such topics.
 */
void
RelayWakeupArm(RelayDatabase *database, const TopicSet *wanted)
{
	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		if (wanted->words[word] != 0)
			(void) pg_atomic_fetch_or_u64(&database->armed[word], wanted->words[word]);
	}
	pg_memory_barrier();
}

/*
 * RelayWakeupTake takes the wakeups that were requested in a database: it sets the topics.
 * Returns false if there are none.
 */
bool
RelayWakeupTake(RelayDatabase *database, TopicSet *requested)
{
	uint64 any = 0;

	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		requested->words[word] = pg_atomic_read_u64(&database->requested[word]);
		if (requested->words[word] != 0)
			requested->words[word] = pg_atomic_exchange_u64(&database->requested[word], 0);
		any |= requested->words[word];
	}
	return any != 0;
}

/* ----------------------------------------------------------------
 * Pending changes
 * ----------------------------------------------------------------
 */

/*
 * AfterPublish keeps the topic of an event.
 */
static void
AfterPublish(const text *topic)
{
	if (Registry == NULL)
		return;
	if (!published)
		memset(&topics, 0, sizeof(topics));
	published = true;
	TopicSetAddTopic(&topics, topic);
}

/*
 * AddChange keeps a change of a subscription and returns it, or NULL if there are too
 * many: then none is kept.
 */
static Change *
AddChange(ChangeKind kind, int64 number)
{
	if (Registry == NULL || changeCount == CHANGES_LOST)
		return NULL;
	if (++changeCount == CHANGES_LOST)
		return NULL;
	changes[changeCount - 1] = (Change){.kind = kind, .number = number};
	return &changes[changeCount - 1];
}

/*
 * AfterSubscribe keeps that a subscription has a handler, to be run as "owner", and which
 * topics it wants.
 */
static void
AfterSubscribe(int64 number, Oid owner, const TopicPatterns *patterns)
{
	Change *change = AddChange(CHANGE_PUT, number);

	if (Registry != NULL && !RegistryHasSlot(MyDatabaseId, number))
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("no slot is free for another subscription with a handler"),
				 errdetail("All %d slots of idempotency.relay_subscriptions are in use. The "
						   "handler is called when one becomes free.",
						   RelaySubscriptions),
				 errhint("Increase idempotency.relay_subscriptions and restart the server.")));
	if (change != NULL)
	{
		change->owner = owner;
		TopicSetFromPatterns(&change->wants, patterns);
	}
}

/*
 * AfterUnsubscribe keeps that a subscription has no handler any more.
 */
static void
AfterUnsubscribe(int64 number)
{
	(void) AddChange(CHANGE_REMOVED, number);
}

/*
 * AfterRedrive keeps that a subscription has something to do.
 */
static void
AfterRedrive(int64 number)
{
	(void) AddChange(CHANGE_DUE, number);
}

/*
 * RelayHasChanges tells whether the transaction may have changed a subscription.
 */
bool
RelayHasChanges(void)
{
	return changeCount > 0;
}

/*
 * ApplyChanges changes the registry, and requests a survey of what got no slot or was
 * not kept.
 */
static void
ApplyChanges(void)
{
	bool complete = changeCount != CHANGES_LOST;
	int kept = complete ? changeCount : 0;

	for (int i = 0; i < kept; i++)
	{
		const Change *change = &changes[i];

		if (change->kind == CHANGE_PUT)
			complete &= RegistryPut(MyDatabaseId, change->number, change->owner, &change->wants);
		else if (change->kind == CHANGE_REMOVED)
			RegistryRemove(MyDatabaseId, change->number);
		else
			RegistryMarkDue(MyDatabaseId, change->number);
	}
	if (!complete)
		RequestVisit();
}

/* ----------------------------------------------------------------
 * The end of the transaction
 * ----------------------------------------------------------------
 */

/*
 * TransactionCallback passes the changes and topics to the relay at commit, when others can
 * see what the transaction wrote, and drops them at any end.  It cannot fail.
 */
static void
TransactionCallback(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE)
		return;
	if (event == XACT_EVENT_COMMIT && changeCount > 0)
	{
		InjectionPoint("commit-change");
		ApplyChanges();
	}
	if (event == XACT_EVENT_COMMIT && published)
	{
		InjectionPoint("commit-request");
		RequestWakeup();
	}
	published = false;
	changeCount = 0;
}

/*
 * SubTransactionCallback drops the changes at a rollback to a savepoint.
 */
static void
SubTransactionCallback(SubXactEvent event, SubTransactionId child, SubTransactionId parent,
					   void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB && changeCount > 0)
		changeCount = CHANGES_LOST;
}

/*
 * RelayWakeupInit registers the callbacks; called once per backend, from _PG_init().
 */
void
RelayWakeupInit(void)
{
	OutboxNotify = (OutboxCallbacks){AfterPublish, AfterSubscribe, AfterUnsubscribe, AfterRedrive};
	RegisterXactCallback(TransactionCallback, NULL);
	RegisterSubXactCallback(SubTransactionCallback, NULL);
}
