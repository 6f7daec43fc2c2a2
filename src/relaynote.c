/*-------------------------------------------------------------------------
 *
 * relaynote.c
 *	  What the relay is to be told when this transaction commits.
 *
 * Which topics were published, and which subscriptions were made, changed,
 * removed or redriven.  A rollback to a savepoint undoes what was noted of subscriptions, since a
 * handler that is known by topics that it does not have is not woken.  It leaves the
 * topics of events: a worker that finds nothing does no harm.  COMMIT PREPARED runs in a backend
 *that knows nothing of the transaction; what it commits is found by the survey that the reaper
 *makes at its next visit.
 *
 * There is room for NOTES subscriptions a transaction, so that nothing can fail
 * when they are read after the commit.  Whoever changes more calls the reaper, and so does
 * a commit whose subscription gets no place in the registry.
 *
 * Locks: the registry's, at commit, if a subscription was changed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"

#include "compat.h"
#include "guc.h"
#include "launcher.h"
#include "outboxerrors.h"
#include "relaybell.h"
#include "relaynote.h"
#include "relayregistry.h"
#include "shmem.h"

#define NOTES 16

typedef enum NoteKind
{
	NOTE_PUT,
	NOTE_REMOVED,
	NOTE_DUE,
	NOTE_UNDONE
} NoteKind;

typedef struct Note
{
	NoteKind kind;
	int64 number;
	Oid owner;
	TopicSet wants;
	SubTransactionId madeIn;
} Note;

static bool published = false;
static TopicSet topics; /* of what was published */
static Note notes[NOTES];
static int noteCount = 0;  /* NOTES + 1: there was no room */
static int subscribed = 0; /* so many subscriptions were to get a place */

/*
 * RelayAfterPublish notes that there is an event, and its topic.
 */
void
RelayAfterPublish(const text *topic)
{
	if (Shared == NULL)
		return;
	if (!published)
		memset(&topics, 0, sizeof(topics));
	published = true;
	TopicSetAddTopic(&topics, topic);
}

/*
 * Add notes something about a subscription.
 */
static void
Add(NoteKind kind, int64 number)
{
	if (Shared == NULL || noteCount > NOTES)
		return;
	if (noteCount < NOTES)
		notes[noteCount] =
			(Note){.kind = kind, .number = number, .madeIn = GetCurrentSubTransactionId()};
	noteCount++;
}

/*
 * RelayAfterSubscribe notes that a subscription has a handler, to be run as
 * "owner", and which topics it wants.
 */
void
RelayAfterSubscribe(int64 number, Oid owner, const TopicPatterns *patterns)
{
	Add(NOTE_PUT, number);
	if (Shared != NULL && !RegistryHasRoom(MyDatabaseId, number, subscribed++))
		WarnNoRelayPlace(RelaySubscriptions);
	if (noteCount > 0 && noteCount <= NOTES)
	{
		notes[noteCount - 1].owner = owner;
		TopicSetFromPatterns(&notes[noteCount - 1].wants, patterns);
	}
}

/*
 * RelayAfterUnsubscribe notes that a subscription has no handler any more.
 */
void
RelayAfterUnsubscribe(int64 number)
{
	Add(NOTE_REMOVED, number);
}

/*
 * RelayAfterRedrive notes that a subscription has something to do.
 */
void
RelayAfterRedrive(int64 number)
{
	Add(NOTE_DUE, number);
}

/*
 * RelayHasNotes tells whether the transaction may have changed any subscription.
 */
bool
RelayHasNotes(void)
{
	return noteCount > 0;
}

/*
 * TellRegistry passes on what was noted of subscriptions.
 */
static void
TellRegistry(void)
{
	bool room = noteCount <= NOTES;

	for (int i = 0; i < Min(noteCount, NOTES); i++)
	{
		switch (notes[i].kind)
		{
			case NOTE_PUT:
				room &= RegistryPut(MyDatabaseId, notes[i].number, notes[i].owner, &notes[i].wants);
				break;
			case NOTE_REMOVED:
				RegistryRemove(MyDatabaseId, notes[i].number);
				break;
			case NOTE_DUE:
				RegistryMarkDue(MyDatabaseId, notes[i].number);
				break;
			case NOTE_UNDONE:
				break;
		}
	}
	if (!room)
		LauncherCall();
}

/*
 * RelayAtSubAbort undoes what the subtransaction has noted of subscriptions.
 */
void
RelayAtSubAbort(SubTransactionId aborted)
{
	for (int i = 0; i < Min(noteCount, NOTES); i++)
	{
		if (notes[i].madeIn == aborted)
			notes[i].kind = NOTE_UNDONE;
	}
}

/*
 * RelayAtSubCommit hands the notes of a subtransaction to its parent.
 */
void
RelayAtSubCommit(SubTransactionId child, SubTransactionId parent)
{
	for (int i = 0; i < Min(noteCount, NOTES); i++)
	{
		if (notes[i].madeIn == child)
			notes[i].madeIn = parent;
	}
}

/*
 * RelayAtCommit tells the relay, and forgets what was noted; for
 * XACT_EVENT_COMMIT, when others can see what the transaction wrote.  It cannot
 * fail.
 */
void
RelayAtCommit(void)
{
	if (noteCount > 0)
	{
		InjectionPoint("commit-tell");
		TellRegistry();
	}
	if (published)
	{
		InjectionPoint("commit-ring");
		BellRing(&topics);
	}
	RelayAtAbort();
}

/*
 * RelayAtAbort forgets what was noted; for XACT_EVENT_ABORT, and for
 * XACT_EVENT_PREPARE.
 */
void
RelayAtAbort(void)
{
	published = false;
	noteCount = 0;
	subscribed = 0;
}
