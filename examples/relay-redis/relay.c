/*-------------------------------------------------------------------------
 *
 * relay.c
 *	  Carries events from the outbox of PostgreSQL to Redis Streams.
 *
 *		fetch  ->  XADD, XADD, ...  ->  ack
 *
 * A batch is acknowledged when Redis has taken all of it, and not before: whatever
 * ends this program, or a connection, in between makes that batch come again.  So
 * each event is in its stream at least once, in order, and whoever reads the stream
 * asks idempotency.once() about the event's id.
 *
 * Several relays may serve one subscription: one works, the others stand by.
 *
 *-------------------------------------------------------------------------
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "relay.h"

static const char *const help =
	"relay-redis carries events from the outbox of PostgreSQL to Redis Streams.\n"
	"\n"
	"Usage: relay-redis --subscription=NAME [option ...]\n"
	"\n"
	"  -s, --subscription=NAME   the subscription to serve; it must exist, have no handler, and\n"
	"                            belong to the role that connects\n" COMMON_HELP
	"  -o, --stream=NAME         the stream to add to; %t stands for the topic (default\n"
	"                            events:%t)\n"
	"  -m, --maxlen=N            let Redis trim each stream to some N entries, read or not\n"
	"  -b, --batch=N             events in one batch, at most (default 100)\n"
	"  -p, --pipeline=N          of those, so many in one MULTI (default 100)\n"
	"  -l, --lease=SECONDS       how long a batch is ours unless it is extended, and how long\n"
	"                            the next relay waits if this one dies (default 30)\n"
	"  -w, --wait=SECONDS        how long one fetch waits for events (default 30)\n"
	"  -t, --timeout=SECONDS     how long an answer may take (default 10)\n"
	"  -g, --give-up=SECONDS     leave when PostgreSQL or Redis has failed for so long (default:\n"
	"                            never)\n"
	"  -D, --drain               leave when a fetch has waited in vain\n"
	"  -v, --verbose             log every batch\n"
	"  -h, --help                print this\n"
	"\n"
	"Log lines go to stderr.  SIGTERM or SIGINT: finishes the batch, or gives it back, and\n"
	"leaves; a second one kills.\n"
	"\n"
	"Exit codes: 0 asked to leave, or drained; 1 PostgreSQL refuses (no such subscription, no\n"
	"right to it); 2 the command line; 3 gave up.\n";

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
			/* getopt has said what is wrong */
			fputs("Try --help.\n", stderr);
			exit(EXIT_USAGE);
	}
}

/*
 * ReadArguments reads the command line.  Leaves if it is wrong.
 */
static void
ReadArguments(Relay *relay, int argc, char **argv)
{
	int option;

	while ((option = getopt_long(argc, argv, "s:d:r:o:m:b:p:l:w:t:g:Dvh", options, NULL)) != -1)
		ReadOption(relay, option, optarg);
	if (optind < argc)
		Usage("\"%s\" is one word too many", argv[optind]);
	if (relay->subscription == NULL)
		Usage("which subscription?");
	if (relay->stream[0] == '\0')
		Usage("--stream takes a name");
	CommonEnd(&relay->common, &relay->postgres, &relay->redis, "relay-redis");
}

/*
 * Serve delivers batches until the program is to leave, or, with --drain, nothing is
 * left.  Fetches only while Redis is there: a batch out of reach helps nobody.
 */
static void
Serve(Relay *relay)
{
	while (!Stopping() && RedisReady(&relay->redis) && PostgresReady(&relay->postgres))
	{
		if (!FetchBatch(relay))
			continue;
		if (relay->count == 0)
		{
			if (relay->common.drain)
				break;
			continue;
		}
		if (AddBatch(relay) && AcknowledgeBatch(relay))
			relay->delivered += relay->count;
		else
			GiveBackBatch(relay);
		ForgetBatch(relay);
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

	PatienceBegin("relay-redis");
	ReadArguments(&relay, argc, argv);
	Say("serving %s", relay.subscription);
	Serve(&relay);
	PostgresClose(&relay.postgres);
	RedisClose(&relay.redis);
	Say("leaving, %lld events delivered", relay.delivered);
	return ExitCode();
}
