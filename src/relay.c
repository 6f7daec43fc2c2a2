/*-------------------------------------------------------------------------
 *
 * relay.c
 *	  The worker that gives the events of a subscription to its handler.
 *
 * It connects as the owner of the subscription and works in steps of a transaction
 * each (relaystep.c).  A step gives the batch that is out to the handler, event by
 * event (relayevent.c), parks the events that failed, acknowledges the batch, and
 * fetches the next one (relaybatch.c).  So the handler's writes and the position
 * commit together, and that a batch is out is committed before the handler sees any
 * of it:
 *
 *		step 1		fetch A
 *		step 2		handle A, acknowledge A, fetch B
 *		step 3		handle B, acknowledge B, nothing to fetch
 *
 * A step that takes long acknowledges the part of the batch that it has handled, and
 * fetches the rest once more.
 *
 * The worker leaves when it has found nothing for a while, or when others need its
 * place (relaystay.c).  Before it leaves for want of events, it arms the bell and looks
 * once more (relaybell.c).  If the subscription whose turn is next is of the same owner
 * and database, it goes on with that one.
 *
 * However it ends, it tells the registry how it has left.  If the server is stopped, or the
 * database is to be dropped or copied, it gives the batch back that is out: none of its
 * events is to blame.
 *
 * Locks: those of a step, to its end.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "utils/pidfile.h"
#include "utils/snapmgr.h"

#include "databases.h"
#include "deferred.h"
#include "guc.h"
#include "outboxtable.h"
#include "relay.h"
#include "relayinternal.h"
#include "wakeup.h"
#include "worker.h"

static RelayTask task;
static bool attached = false; /* to the task, and nobody else is */

/* How we leave, if we are ended just now, and when there is something to do again. */
static RelayEnd leaving = RELAY_DIED;
static TimestampTz nextDue = 0;

/*
 * Look does a step, before which nobody may have missed that something is published
 * or due.  "last" says that we leave if it finds nothing.
 */
static Step
Look(bool last)
{
	RelayEnd end;
	Step step;

	if (!RelayBatchIsOut())
	{
		/* A bell that has rung is answered after this: then we are due again. */
		RegistryBeginLook(&task, last);
		WakeupPrepare(OutboxChannel());
	}
	leaving = RELAY_DIED;
	step = RelayStepDo(&task, last, &end, &nextDue);
	leaving = end;
	return step;
}

/*
 * Serve does steps for the subscription until it is time to leave it.
 */
static void
Serve(void)
{
	bool served = false;
	bool last = false;
	instr_time servedAt;

	RelayStayBegin();
	leaving = RELAY_GOES_ON;
	nextDue = 0;
	while (!ShutdownRequestPending && RelayWorkers > 0)
	{
		Step step = Look(last);
		long ms;

		if (step == STEP_LEAVE)
			return;
		if (step == STEP_SERVED)
		{
			served = true;
			last = false;
			INSTR_TIME_SET_CURRENT(servedAt);
		}
		else if (last)
		{
			leaving = RELAY_IDLE;
			return;
		}
		else if (served && (ms = RelayStaySleepTime(servedAt, nextDue)) > 0)
			RelayStaySleep(ms);
		else
			last = true;
		WorkerReload();
	}
}

/*
 * MoveOn leaves the subscription, and takes up the next one, if there is one that
 * we can serve as who we are.  Returns whether there is.
 */
static bool
MoveOn(void)
{
	RelayTask next;
	bool open;

	if (RelayBatchIsOut() || ShutdownRequestPending)
		return false;
	StartTransactionCommand();
	open = DatabaseIsOpen(MyDatabaseId);
	CommitTransactionCommand();
	if (!open)
		return false;

	RelayBatchLeave(&task);
	attached = RegistryMoveOn(&task, leaving, nextDue, RelayWorkers, &next);
	if (attached)
		task = next;
	return attached;
}

/* ----------------------------------------------------------------
 * The end
 * ----------------------------------------------------------------
 */

/*
 * SayGoodbye tells the registry how we have left.
 */
static void
SayGoodbye(int code, Datum arg)
{
	if (!attached)
		return;
	RelayBatchLeave(&task);
	RegistryLeave(&task, leaving, nextDue);
}

/*
 * ServerIsStopping tells whether somebody is stopping the server, as opposed to
 * this worker: the postmaster notes it in its lock file.
 */
static bool
ServerIsStopping(void)
{
	char content[1024];
	char *line = content;
	int file = BasicOpenFile("postmaster.pid", O_RDONLY);
	ssize_t length = file < 0 ? -1 : read(file, content, sizeof(content) - 1);

	if (file >= 0)
		close(file);
	if (length < 0)
		return false;
	content[length] = '\0';
	for (int i = 1; i < LOCK_FILE_LINE_PM_STATUS && line != NULL; i++)
	{
		line = strchr(line, '\n');
		line += line != NULL;
	}
	return line != NULL && strncmp(line, PM_STATUS_STOPPING, strlen(PM_STATUS_STOPPING)) == 0;
}

/* How often, and how long apart, a worker that ends asks for the subscription. */
#define GIVE_BACK_TRIES 100
#define GIVE_BACK_MS 10

/*
 * GiveBack gives the batch back, in a transaction of its own.  Returns false if another
 * session has the subscription: one that was waiting for it gets it before us.
 */
static bool
GiveBack(void)
{
	Subscription *subscription;
	bool done;

	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = SubscriptionFindNumber(task.number);
	done = subscription == NULL || SubscriptionLock(subscription->name, 0);
	if (done && subscription != NULL)
	{
		/* what the session before us did to it */
		PopActiveSnapshot();
		PushActiveSnapshot(GetTransactionSnapshot());
		subscription = SubscriptionFindNumber(task.number);
		if (subscription != NULL)
			RelayBatchGiveBack(subscription);
	}
	RelayStepCommitHere();
	PopActiveSnapshot();
	CommitTransactionCommand();
	return done;
}

/*
 * GiveBackAtStop gives the batch that is out back, if the server is being stopped, or
 * the database is to be dropped or copied: then none of its events has failed.  What the handler
 * did with them is rolled back.  Nothing can end a wait any more, be it for a lock or for a
 * standby, which would keep the server from stopping: so it tries for a second, and leaves a note
 * for the next worker in the registry in any case.
 */
static void
GiveBackAtStop(int code, Datum arg)
{
	if (RegistryIsRecalled(&task))
		leaving = RELAY_BUSY;
	else if (!RelayBatchIsOut() || !ServerIsStopping())
		return;
	if (!RelayBatchIsOut())
		return;
	AbortOutOfAnyTransaction();
	for (int tries = 0; !GiveBack() && tries < GIVE_BACK_TRIES; tries++)
		pg_usleep(GIVE_BACK_MS * 1000L);
	RelayBatchDisown(&task);
}

/*
 * Refused is told why we could not connect.  The log gets it once.
 */
static void
Refused(ErrorData *error)
{
	leaving = RELAY_UNFIT;
	if (RegistryNoteProblem(&task, error->message, false))
		error->elevel = LOG;
	else
		error->output_to_server = false;
}

/*
 * idempotency_relay_main is the worker.
 */
void
idempotency_relay_main(Datum unused)
{
	memcpy(&task, MyBgworkerEntry->bgw_extra, sizeof(RelayTask));
	attached = RegistryAttach(&task);
	if (!attached)
		proc_exit(0);
	before_shmem_exit(SayGoodbye, (Datum) 0);

	WorkerConnectAs(task.database, task.owner, Refused);
	pqsignal(SIGTERM, RelayStayTerminate);
	before_shmem_exit(GiveBackAtStop, (Datum) 0);
	RegistryMayRecall(&task);

	DeferredInit();
	RelayStepInit();
	do
		Serve();
	while (MoveOn());
	proc_exit(0);
}
