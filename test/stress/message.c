/*-------------------------------------------------------------------------
 *
 * message.c
 *	  Attempts that consume messages of an inbox with once() and once_many().
 *
 * One message or a batch, in a function or in separate statements. A message that
 * once() reports as new is pending until the commit; a message that it reports as seen
 * is committed.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <string.h>

#include "ledger.h"
#include "message.h"
#include "step.h"
#include "tally.h"

/* A batch of messages, in any order, some of them twice. */
typedef struct Batch
{
	int count;
	int keys[MOST_KEYS];
	bool acknowledged[MOST_KEYS]; /* before the query was sent */
} Batch;

/* ----------------------------------------------------------------
 * Batches of messages
 * ----------------------------------------------------------------
 */

/*
 * BatchPick chooses the messages of a batch.
 */
static void
BatchPick(Attempt *attempt, Batch *batch)
{
	batch->count = 2 + RandomBelow(&attempt->random, MOST_KEYS - 1);
	for (int i = 0; i < batch->count; i++)
	{
		batch->keys[i] = PickInboxKey(attempt->number, &attempt->random);
		batch->acknowledged[i] = Acknowledged(batch->keys[i]);
	}
}

/*
 * BatchList writes the keys as an SQL array.
 */
static void
BatchList(const Batch *batch, char list[LIST_TEXT])
{
	int used = snprintf(list, LIST_TEXT, "ARRAY[");

	for (int i = 0; i < batch->count; i++)
	{
		char name[KEY_TEXT];

		KeyText(batch->keys[i], name);
		used += snprintf(list + used, LIST_TEXT - used, "%s'%s'", i > 0 ? ", " : "", name);
	}
	snprintf(list + used, LIST_TEXT - used, "]");
}

/*
 * BatchRead reads the session's result, which is the keys that are new. These become
 * pending; the others were seen.
 */
static void
BatchRead(Attempt *attempt, const Batch *batch)
{
	Session *session = attempt->session;
	bool isNew[MOST_KEYS] = {false};

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = KeyNumber(Value(session, row, 0));
		bool noted = false;

		for (int i = 0; i < batch->count; i++)
		{
			if (batch->keys[i] != key)
				continue;
			isNew[i] = true;
			if (!noted)
				Pend(attempt, key, NULL);
			noted = true;
		}
		if (!noted)
			Violation(
				"[batch] once_many() returned key %s, which is not in its batch or twice in the "
				"answer",
				Value(session, row, 0));
	}
	for (int i = 0; i < batch->count; i++)
		(void) ReadOnce(attempt, batch->keys[i], batch->acknowledged[i], isNew[i]);
}

/* ----------------------------------------------------------------
 * Transactions of several steps
 * ----------------------------------------------------------------
 */

/*
 * Once calls once() for a message.
 */
static Grant
Once(Attempt *attempt, const Part *part)
{
	bool acknowledged = Acknowledged(part->key);

	if (!Ask(attempt->session, NULL, "SELECT idempotency.once('stress/inbox', '%s')", part->name))
	{
		Refused(attempt, part->key, acknowledged, false);
		return GRANT_ERROR;
	}
	return ReadOnce(attempt, part->key, acknowledged, Value(attempt->session, 0, 0)[0] == 't')
			   ? GRANT_CLAIMED
			   : GRANT_NOT;
}

/*
 * OneMessage consumes a message, sometimes after a rolled back attempt, and writes its
 * effect if it is new. Returns false if the transaction failed.
 */
static bool
OneMessage(Attempt *attempt)
{
	Session *session = attempt->session;
	Part part;

	PartFill(&part, PickInboxKey(attempt->number, &attempt->random));
	if (RandomPercent(&attempt->random, 15))
	{
		if (!Ask(session, NULL, "SAVEPOINT taking"))
			return false;
		if (Once(attempt, &part) == GRANT_CLAIMED)
			(void) Insert(attempt, &part, 1, NULL);
		if (session->lost || !RollBackTo(attempt, "taking"))
			return false;
	}

	part.grant = Once(attempt, &part);
	if (part.grant == GRANT_NOT && RandomPercent(&attempt->random, 6))
		return WriteWithoutGrant(attempt, &part) != GRANT_ERROR;
	if (part.grant != GRANT_CLAIMED)
		return part.grant == GRANT_NOT;
	Pend(attempt, part.key, NULL);
	return Delay(attempt) && Write(attempt, &part);
}

/*
 * ManyMessages consumes a batch of messages in any order and writes the effects of the
 * new ones. Returns false if the transaction failed.
 */
static bool
ManyMessages(Attempt *attempt)
{
	Session *session = attempt->session;
	Batch batch;
	char list[LIST_TEXT];
	int used = 0;

	BatchPick(attempt, &batch);
	BatchList(&batch, list);
	if (!Ask(session, NULL, "SELECT * FROM idempotency.once_many('stress/inbox', %s)", list))
		return false;
	BatchRead(attempt, &batch);
	for (int i = 0; i < attempt->pendings; i++)
	{
		int key = attempt->pending[i].key;
		char name[KEY_TEXT];

		KeyText(key, name);
		used += snprintf(list + used, sizeof(list) - used, "%s ('%s', %d, %lld)", i ? "," : "",
						 name, AmountOf(key), (long long) attempt->number);
	}
	return attempt->pendings == 0 ||
		   (Delay(attempt) && Ask(session, NULL, "INSERT INTO stress.deliveries VALUES %s", list));
}

/*
 * AttemptInboxTransaction runs a transaction that consumes messages.
 */
void
AttemptInboxTransaction(Attempt *attempt)
{
	bool many = RandomPercent(&attempt->random, 40);

	attempt->plain = false;
	if (!Begin(attempt) || GivesUp(attempt))
		return;
	if ((many ? ManyMessages : OneMessage)(attempt) && !GivesUp(attempt) && Delay(attempt))
		(void) End(attempt);
}

/* ----------------------------------------------------------------
 * Calls of one function
 * ----------------------------------------------------------------
 */

/*
 * AttemptDeliver delivers one message.
 */
void
AttemptDeliver(Attempt *attempt)
{
	static const char *const endings[] = {"succeed", "succeed", "undo", "raise"};
	const char *ending = endings[RandomBelow(&attempt->random, 4)];
	int key = PickInboxKey(attempt->number, &attempt->random);
	bool acknowledged;
	const char *begin;
	const char *commit;
	char name[KEY_TEXT];
	char delay[DELAY_TEXT];

	attempt->plain = false;
	KeyText(key, name);
	DelayText(attempt, delay);
	if (!Timeouts(attempt, ""))
		return;
	Frame(attempt, &begin, &commit);
	acknowledged = Acknowledged(key);
	if (!Ask(attempt->session, strcmp(ending, "raise") == 0 ? "ST001" : NULL,
			 "%s SELECT stress.deliver('%s', %d, %lld, '%s', %s) %s", begin, name, AmountOf(key),
			 (long long) attempt->number, ending, delay, commit))
	{
		Refused(attempt, key, acknowledged, false);
		return;
	}
	if (ReadOnce(attempt, key, acknowledged, Value(attempt->session, 0, 0)[0] == 't'))
		Pend(attempt, key, NULL);
	PendingHold(attempt);
}

/*
 * AttemptDeliverMany delivers a batch of messages.
 */
void
AttemptDeliverMany(Attempt *attempt)
{
	Batch batch;
	const char *begin;
	const char *commit;
	char list[LIST_TEXT];
	char amounts[LIST_TEXT] = "";
	char delay[DELAY_TEXT];
	int used = 0;

	attempt->plain = false;
	DelayText(attempt, delay);
	if (!Timeouts(attempt, ""))
		return;
	Frame(attempt, &begin, &commit);
	BatchPick(attempt, &batch);
	BatchList(&batch, list);
	for (int i = 0; i < batch.count; i++)
		used += snprintf(amounts + used, sizeof(amounts) - used, "%s%d", i > 0 ? ", " : "",
						 AmountOf(batch.keys[i]));
	if (!Ask(attempt->session, NULL,
			 "%s SELECT * FROM stress.deliver_many(%s, ARRAY[%s], %lld, %s) %s", begin, list,
			 amounts, (long long) attempt->number, delay, commit))
		return;
	BatchRead(attempt, &batch);
	PendingHold(attempt);
}
