/*-------------------------------------------------------------------------
 *
 * relay.c
 *	  Copies events from the outbox of PostgreSQL to Redis Streams.
 *
 *		fetch  ->  XADD, XADD, ...  ->  ack
 *
 * A batch is acknowledged only after Redis has accepted all of it. If this program or a
 * connection ends before that, the batch is redelivered. Therefore each event is in its
 * stream at least once, in order, and a consumer of the stream calls idempotency.once()
 * with the event's id.
 *
 * Several relays can serve one subscription, each another partition.
 *
 *-------------------------------------------------------------------------
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "relay.h"

static const char *const help =
	"relay-redis copies events from the outbox of PostgreSQL to Redis Streams.\n"
	"\n"
	"Usage: relay-redis --subscription=NAME [option ...]\n"
	"\n"
	"  -s, --subscription=NAME   the subscription; it must exist, and belong to the role that\n"
	"                            connects\n" COMMON_HELP
	"  -o, --stream=NAME         the target stream; %t is replaced by the topic (default\n"
	"                            events:%t)\n"
	"  -m, --maxlen=N            let Redis trim each stream to about N entries, read or not\n"
	"  -b, --batch=N             maximum number of events in one batch (default 100)\n"
	"  -p, --pipeline=N          maximum number of events in one MULTI (default 100)\n"
	"  -l, --lease=SECONDS       lease of a batch unless it is extended; if this relay dies, the\n"
	"                            next one waits that long (default 30)\n"
	"  -w, --wait=SECONDS        how long one fetch waits for events (default 30)\n"
	"  -t, --timeout=SECONDS     timeout of an answer (default 10)\n"
	"  -g, --give-up=SECONDS     exit after PostgreSQL or Redis has failed for this long\n"
	"                            (default: never)\n"
	"  -D, --drain               exit when a fetch returns no event\n"
	"  -v, --verbose             log every batch\n"
	"  -h, --help                print this\n"
	"\n"
	"Log lines go to stderr.  SIGTERM or SIGINT: finishes the batch, or returns it, and\n"
	"exits; a second one kills.\n"
	"\n"
	"Exit codes: 0 stopped by a signal, or drained; 1 PostgreSQL refuses (no such subscription,\n"
	"or a missing privilege); 2 invalid command line; 3 gave up.\n";

static const struct option options[] = {{"subscription", required_argument, NULL, 's'},
										{"stream", required_argument, NULL, 'o'},
										{"maxlen", required_argument, NULL, 'm'},
										{"pipeline", required_argument, NULL, 'p'},
										{"lease", required_argument, NULL, 'l'},
										{"wait", required_argument, NULL, 'w'},
										COMMON_OPTIONS};

/*
 * ReadOption takes one option.
 */
static void
ReadOption(Relay *relay, int option, const char *value)
{
	if (CommonOption(&relay->common, &relay->postgres, option, value))
		return;
	switch (option)
	{
		case 's':
			relay->subscription = value;
			break;
		case 'o':
			relay->stream = value;
			break;
		case 'm':
			(void) ParseCount("maxlen", value, 2147483647);
			relay->maxlen = value;
			break;
		case 'p':
			relay->pipeline = ParseCount("pipeline", value, 100000);
			break;
		case 'l':
			relay->lease = ParseSeconds("lease", value);
			break;
		case 'w':
			relay->wait = ParseSeconds("wait", value);
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
ReadArguments(Relay *relay, int argc, char **argv)
{
	int option;

	while ((option = getopt_long(argc, argv, "s:d:r:o:m:b:p:l:w:t:g:Dvh", options, NULL)) != -1)
		ReadOption(relay, option, optarg);
	if (optind < argc)
		Usage("unexpected argument \"%s\"", argv[optind]);
	if (relay->subscription == NULL)
		Usage("--subscription is required");
	if (relay->stream[0] == '\0')
		Usage("--stream must not be empty");
	CommonEnd(&relay->common, &relay->postgres, &relay->redis, "relay-redis");
}

/*
 * Serve delivers batches until the program must exit, or, with --drain, until none is
 * left. It fetches only while Redis is reachable, because otherwise it would only hold
 * a batch.
 */
static void
Serve(Relay *relay)
{
	bool empty = false;

	while (!ExitRequested() && RedisReady(&relay->redis) && PostgresReady(&relay->postgres))
	{
		if (!FetchBatch(relay))
			continue;
		if (relay->count == 0)
		{
			/* The first fetch without events can have passed those of other topics. */
			if (relay->common.drain && empty)
				break;
			empty = true;
			continue;
		}
		empty = false;
		if (AddBatch(relay) && AcknowledgeBatch(relay))
			relay->delivered += relay->count;
		else
			ReturnBatch(relay);
		DiscardBatch(relay);
	}
}

int
main(int argc, char **argv)
{
	Relay relay = {.common = COMMON_DEFAULTS,
				   .stream = "events:%t",
				   .pipeline = 100,
				   .wait = 30000,
				   .lease = 30000};

	ProcessBegin("relay-redis");
	ReadArguments(&relay, argc, argv);
	LogInfo("serving %s", relay.subscription);
	Serve(&relay);
	PostgresClose(&relay.postgres);
	RedisClose(&relay.redis);
	LogInfo("exiting, %lld events delivered", relay.delivered);
	return ExitCode();
}
