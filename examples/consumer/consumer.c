/*-------------------------------------------------------------------------
 *
 * consumer.c
 *	  Reads events from Redis Streams, and gives each its effect in PostgreSQL, once.
 *
 *		XREADGROUP  ->  SELECT function(event), SELECT function(event), ...  ->  XACK
 *
 * A message is acknowledged when the transaction of its effect has committed, and not
 * before: whatever ends this program, or a connection, in between makes it come
 * again, as the relay may have made it come twice already.  The function asks
 * idempotency.once() about the event's id, and so the effect is there once.
 *
 * One consumer keeps the order of a stream, across its own restarts too.  Several
 * consumers share the work, and then the order is nobody's.
 *
 *-------------------------------------------------------------------------
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "consumer.h"

static const char *const help =
	"consumer reads events from Redis Streams, and calls a function of PostgreSQL for each.\n"
	"\n"
	"Usage: consumer --stream=NAME --group=NAME --call=FUNCTION [option ...]\n"
	"\n"
	"  -S, --stream=NAME         a stream to read; may be given more than once\n"
	"  -G, --group=NAME          the consumer group; it is made if it is not there\n"
	"  -c, --call=FUNCTION       (id uuid, topic text, aggregate text, type text, payload json,\n"
	"                            headers json) RETURNS boolean: true if the event was new\n" COMMON_HELP
	"  -n, --name=NAME           our name in the group; the next process with this name goes on\n"
	"                            where we stopped (default: the host's)\n"
	"      --sole                no other process reads for this group: whatever is pending is\n"
	"                            ours, whatever name it was delivered to\n"
	"  -i, --min-idle=SECONDS    how long another consumer must have left a message alone before\n"
	"                            we take it over; longer than its batches take (default 60)\n"
	"      --from=ID             where a new group begins: 0 or $ (default 0, the beginning)\n"
	"  -a, --max-attempts=N      then a message that fails is buried in STREAM:dead (default 10)\n"
	"  -b, --batch=N             messages of each stream in one read, at most (default 100)\n"
	"  -w, --wait=SECONDS        how long one read waits for messages (default 1)\n"
	"  -t, --timeout=SECONDS     how long an answer may take (default 10)\n"
	"  -g, --give-up=SECONDS     leave when PostgreSQL or Redis has failed for so long (default:\n"
	"                            never)\n"
	"  -D, --drain               leave when a read has waited in vain\n"
	"  -v, --verbose             log every batch\n"
	"  -h, --help                print this\n"
	"\n"
	"Log lines go to stderr.  SIGTERM or SIGINT: finishes the batch, and leaves; a second one\n"
	"kills.  What was not acknowledged comes again.\n"
	"\n"
	"Exit codes: 0 asked to leave, or drained; 1 PostgreSQL refuses (no such function, no right\n"
	"to it, or the function does what its owner must not); 2 the command line; 3 gave up.\n";

enum
{
	OPTION_SOLE = 1000,
	OPTION_FROM
};

static const struct option options[] = {
	{"stream", required_argument, NULL, 'S'},		{"group", required_argument, NULL, 'G'},
	{"call", required_argument, NULL, 'c'},			{"name", required_argument, NULL, 'n'},
	{"sole", no_argument, NULL, OPTION_SOLE},		{"min-idle", required_argument, NULL, 'i'},
	{"from", required_argument, NULL, OPTION_FROM}, {"max-attempts", required_argument, NULL, 'a'},
	{"wait", required_argument, NULL, 'w'},			COMMON_OPTIONS};

/*
 * ReadOption takes one option.
 */
static void
ReadOption(Consumer *consumer, int option, const char *value)
{
	if (CommonOption(&consumer->common, &consumer->postgres, option, value))
		return;
	switch (option)
	{
		case 'S':
			if (consumer->streamCount == MOST_STREAMS)
				Usage("more than %d streams", MOST_STREAMS);
			consumer->streams[consumer->streamCount++] = value;
			break;
		case 'G':
			consumer->group = value;
			break;
		case 'c':
			consumer->function = value;
			break;
		case 'n':
			consumer->name = value;
			break;
		case OPTION_SOLE:
			consumer->sole = true;
			break;
		case 'i':
			consumer->minIdle = ParseSeconds("min-idle", value);
			break;
		case OPTION_FROM:
			consumer->from = value;
			break;
		case 'a':
			consumer->maxAttempts = ParseCount("max-attempts", value, 1000000);
			break;
		case 'w':
			consumer->wait = ParseSeconds("wait", value);
			break;
		case 'h':
			fputs(help, stdout);
			exit(EXIT_STOPPED);
		default:
			/* getopt has said what is wrong */
			fputs("Try --help.\n", stderr);
			exit(EXIT_USAGE);
	}
}

/*
 * ReadArguments reads the command line.  Leaves if it is wrong.
 */
static void
ReadArguments(Consumer *consumer, int argc, char **argv)
{
	static char host[256];
	int option;

	while ((option = getopt_long(argc, argv, "S:G:c:d:r:n:i:a:b:w:t:g:Dvh", options, NULL)) != -1)
		ReadOption(consumer, option, optarg);
	if (optind < argc)
		Usage("\"%s\" is one word too many", argv[optind]);
	if (consumer->streamCount == 0)
		Usage("which stream?");
	if (consumer->group == NULL)
		Usage("which group?");
	if (consumer->function == NULL)
		Usage("which function is to be called?");
	if (consumer->name == NULL)
	{
		if (gethostname(host, sizeof(host) - 1) != 0 || host[0] == '\0')
			Usage("this host has no name, and so --name is needed");
		consumer->name = host;
	}
	CommonEnd(&consumer->common, &consumer->postgres, &consumer->redis, "consumer");
}

/*
 * Consume handles the messages of one read, and acknowledges those that are done
 * with.  Returns whether there were any.
 */
static bool
Consume(Consumer *consumer, const redisReply *reply)
{
	int count = CountMessages(reply);
	int done;

	if (count == 0)
		return false;
	Note("read %d messages%s", count, consumer->pending ? ", pending" : "");
	done = HandleMessages(consumer, reply);
	if (AcknowledgeMessages(consumer, reply, done))
		Note("acknowledged %d messages", done);
	return true;
}

/*
 * Serve handles messages until the program is to leave, or, with --drain, nothing is
 * left.
 */
static void
Serve(Consumer *consumer)
{
	while (!Stopping() && RedisReady(&consumer->redis) && PostgresReady(&consumer->postgres))
	{
		redisReply *reply;
		bool any;

		if (consumer->call == NULL && !FindFunction(consumer))
			continue;
		if (!PrepareGroup(consumer))
			continue;
		reply = ReadMessages(consumer);
		if (reply == NULL)
			continue;
		any = Consume(consumer, reply);
		freeReplyObject(reply);
		if (any)
			continue;
		if (consumer->common.drain && !consumer->pending)
			break;
		consumer->pending = false;
	}
}

int
main(int argc, char **argv)
{
	Consumer consumer = {
		.common = COMMON_DEFAULTS, .from = "0", .wait = 1000, .minIdle = 60000, .maxAttempts = 10};

	PatienceBegin("consumer");
	ReadArguments(&consumer, argc, argv);
	Say("consuming as %s of group %s", consumer.name, consumer.group);
	Serve(&consumer);
	PostgresClose(&consumer.postgres);
	RedisClose(&consumer.redis);
	free(consumer.call);
	Say("leaving, %lld messages handled, %lld of them seen before, %lld buried", consumer.handled,
		consumer.seenBefore, consumer.dead);
	return ExitCode();
}
