/*-------------------------------------------------------------------------
 *
 * consumer.c
 *	  Reads events from Redis Streams, and applies each once in PostgreSQL.
 *
 *		XREADGROUP  ->  SELECT function(event), SELECT function(event), ...  ->  XACK
 *
 * A message is acknowledged only after the transaction of its effect has committed. If
 * this program or a connection ends before that, the message is redelivered; the relay
 * can have added it twice as well. The function calls idempotency.once() with the
 * event's id, so the effect happens once.
 *
 * One consumer keeps the order of a stream, across its own restarts too. Several
 * consumers share the work, without any order.
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
	"  -G, --group=NAME          the consumer group; created if it does not exist\n"
	"  -c, --call=FUNCTION       (id uuid, topic text, aggregate text, type text, payload json,\n"
	"                            headers json) RETURNS boolean: true if the event was new\n" COMMON_HELP
	"  -n, --name=NAME           the name of this consumer in the group; the next process with\n"
	"                            this name continues its work (default: the host's name)\n"
	"      --sole                no other process reads for this group: this consumer takes all\n"
	"                            pending messages, whatever consumer they were delivered to\n"
	"  -i, --min-idle=SECONDS    how long a message of another consumer must be idle before it\n"
	"                            is claimed; must exceed the time for a batch (default 60)\n"
	"      --from=ID             the start of a new group: 0 or $ (default 0, the beginning)\n"
	"  -a, --max-attempts=N      attempts before a message is moved to STREAM:dead (default 10)\n"
	"  -b, --batch=N             maximum number of messages per stream in one read (default 100)\n"
	"  -w, --wait=SECONDS        how long one read waits for messages (default 1)\n"
	"  -t, --timeout=SECONDS     timeout of an answer (default 10)\n"
	"  -g, --give-up=SECONDS     exit after PostgreSQL or Redis has failed for this long\n"
	"                            (default: never)\n"
	"  -D, --drain               exit when a read returns no message\n"
	"  -v, --verbose             log every batch\n"
	"  -h, --help                print this\n"
	"\n"
	"Log lines go to stderr.  SIGTERM or SIGINT: finishes the batch, and exits; a second one\n"
	"kills.  Messages that were not acknowledged are redelivered.\n"
	"\n"
	"Exit codes: 0 stopped by a signal, or drained; 1 PostgreSQL refuses (no such function, or\n"
	"a missing privilege of the role or of the function's owner); 2 invalid command line; 3 gave\n"
	"up.\n";

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
			/* getopt has printed the error. */
			fputs("Try --help.\n", stderr);
			exit(EXIT_USAGE);
	}
}

/*
 * ReadArguments reads the command line. Exits if it is invalid.
 */
static void
ReadArguments(Consumer *consumer, int argc, char **argv)
{
	static char host[256];
	int option;

	while ((option = getopt_long(argc, argv, "S:G:c:d:r:n:i:a:b:w:t:g:Dvh", options, NULL)) != -1)
		ReadOption(consumer, option, optarg);
	if (optind < argc)
		Usage("unexpected argument \"%s\"", argv[optind]);
	if (consumer->streamCount == 0)
		Usage("--stream is required");
	if (consumer->group == NULL)
		Usage("--group is required");
	if (consumer->function == NULL)
		Usage("--call is required");
	if (consumer->name == NULL)
	{
		if (gethostname(host, sizeof(host) - 1) != 0 || host[0] == '\0')
			Usage("this host has no name: --name is required");
		consumer->name = host;
	}
	CommonEnd(&consumer->common, &consumer->postgres, &consumer->redis, "consumer");
}

/*
 * Consume handles the messages of one read, and acknowledges the finished ones. Returns
 * whether there were any.
 */
static bool
Consume(Consumer *consumer, const redisReply *reply)
{
	int count = CountMessages(reply);
	int done;

	if (count == 0)
		return false;
	LogDebug("read %d messages%s", count, consumer->pending ? ", pending" : "");
	done = HandleMessages(consumer, reply);
	if (AcknowledgeMessages(consumer, reply, done))
		LogDebug("acknowledged %d messages", done);
	return true;
}

/*
 * Serve handles messages until the program must exit, or, with --drain, until none is
 * left.
 */
static void
Serve(Consumer *consumer)
{
	while (!ExitRequested() && RedisReady(&consumer->redis) && PostgresReady(&consumer->postgres))
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

	ProcessBegin("consumer");
	ReadArguments(&consumer, argc, argv);
	LogInfo("consuming as %s of group %s", consumer.name, consumer.group);
	Serve(&consumer);
	PostgresClose(&consumer.postgres);
	RedisClose(&consumer.redis);
	free(consumer.call);
	LogInfo("exiting, %lld messages handled, %lld of them seen before, %lld dead", consumer.handled,
			consumer.seenBefore, consumer.dead);
	return ExitCode();
}
