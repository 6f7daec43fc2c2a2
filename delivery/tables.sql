-- ---------------------------------------------------------------------------
-- Delivery: the outbox, subscriptions and their positions
-- ---------------------------------------------------------------------------

-- An append-only log.  The columns from aggregatetype to payload, and id, are those of
-- Debezium's outbox event router.  publish() assigns the transaction its id before it draws
-- seq, from a sequence whose cache must stay 1: the scan depends on both.  bucket is stored,
-- because a hash that another server or version computes can differ, and an aggregate must
-- not change its partition.  bytes bounds batches without reading payloads.
CREATE TABLE idempotency.outbox (
	seq bigint NOT NULL,
	txid xid8 NOT NULL,
	published_at timestamptz NOT NULL,
	id uuid NOT NULL,
	bucket integer NOT NULL,
	bytes integer NOT NULL,
	deliver_at timestamptz,
	aggregatetype text COLLATE "C" NOT NULL,
	aggregateid text COLLATE "C",
	type text COLLATE "C",
	payload json,
	headers json,
	PRIMARY KEY (seq)
)
WITH (
	autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = false,
	toast.autovacuum_vacuum_scale_factor = 0.1, toast.vacuum_truncate = false
);
COMMENT ON TABLE idempotency.outbox IS 'published events; only publish() writes them';
COMMENT ON COLUMN idempotency.outbox.seq IS 'the order in which the events were published';
COMMENT ON COLUMN idempotency.outbox.txid IS 'the transaction that published the event';
COMMENT ON COLUMN idempotency.outbox.published_at IS 'when publish() was called';
COMMENT ON COLUMN idempotency.outbox.id IS 'the event''s id, by which consumers deduplicate';
COMMENT ON COLUMN idempotency.outbox.bucket IS 'hash of the aggregate, or of the id without one; it selects the partition';
COMMENT ON COLUMN idempotency.outbox.bytes IS 'size of payload and headers';
COMMENT ON COLUMN idempotency.outbox.deliver_at IS 'the event is not delivered before; NULL: at once, in the order of its aggregate';
COMMENT ON COLUMN idempotency.outbox.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.outbox.aggregateid IS 'the object of the event; events of one aggregate keep their order';
COMMENT ON COLUMN idempotency.outbox.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.outbox.payload IS 'the payload, byte for byte';
COMMENT ON COLUMN idempotency.outbox.headers IS 'metadata; scope and key of the claim under which the event was published';
COMMENT ON INDEX idempotency.outbox_pkey IS 'the order in which delivery reads';

-- An event does not change: a subscription that has passed its number would miss the change.
CREATE FUNCTION idempotency_internal.refuse_update()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RAISE EXCEPTION USING
		ERRCODE = 'feature_not_supported',
		MESSAGE = 'cannot update table "idempotency.outbox"',
		DETAIL = 'Published events do not change.',
		HINT = 'Publish another event with idempotency.publish().';
END
$$;
COMMENT ON FUNCTION idempotency_internal.refuse_update() IS 'trigger: refuse an UPDATE of the outbox';
CREATE TRIGGER refuse_update BEFORE UPDATE ON idempotency.outbox
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.refuse_update();
COMMENT ON TRIGGER refuse_update ON idempotency.outbox IS 'published events do not change';

CREATE SEQUENCE idempotency.outbox_seq AS bigint NO CYCLE CACHE 1;
COMMENT ON SEQUENCE idempotency.outbox_seq IS 'numbers of events; the cache must stay 1';

-- owner and handler are names, since a dump can be restored before roles and functions exist,
-- and pg_upgrade refuses regprocedure columns.
CREATE TABLE idempotency.subscription (
	subscription text COLLATE "C" NOT NULL PRIMARY KEY,
	owner name NOT NULL,
	topics text[] COLLATE "C" NOT NULL,
	patterns text[] COLLATE "C" NOT NULL,
	handler text,
	start_at text NOT NULL,
	max_attempts integer NOT NULL,
	retry_delay interval NOT NULL,
	max_retry_delay interval NOT NULL,
	max_lag interval,
	dead_letter_retention interval,
	paused_at timestamptz,
	created_at timestamptz NOT NULL
);
COMMENT ON TABLE idempotency.subscription IS 'subscriptions and their options';
COMMENT ON COLUMN idempotency.subscription.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.subscription.owner IS 'the role whose members can use the subscription';
COMMENT ON COLUMN idempotency.subscription.topics IS 'patterns of topics';
COMMENT ON COLUMN idempotency.subscription.patterns IS 'the same patterns for LIKE';
COMMENT ON COLUMN idempotency.subscription.handler IS 'the function that deliver() calls for the owner; NULL: none';
COMMENT ON COLUMN idempotency.subscription.start_at IS 'where the subscription started: now or beginning';
COMMENT ON COLUMN idempotency.subscription.max_attempts IS 'number of failures after which an event becomes a dead letter';
COMMENT ON COLUMN idempotency.subscription.retry_delay IS 'delay of the first retry';
COMMENT ON COLUMN idempotency.subscription.max_retry_delay IS 'longest delay of a retry';
COMMENT ON COLUMN idempotency.subscription.max_lag IS 'age at which an undelivered event is dropped; NULL: never';
COMMENT ON COLUMN idempotency.subscription.dead_letter_retention IS 'age at which a dead letter is deleted; NULL: never';
COMMENT ON COLUMN idempotency.subscription.paused_at IS 'since when nothing is delivered; NULL: it is not paused';
COMMENT ON COLUMN idempotency.subscription.created_at IS 'when the subscription was created';
COMMENT ON INDEX idempotency.subscription_pkey IS 'one row per subscription';

-- extension only
CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON idempotency.subscription
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.subscriptions_changed();
COMMENT ON TRIGGER changed ON idempotency.subscription IS 'workers look at subscriptions that have changed';
-- both editions

-- A partition has the events whose bucket modulo "modulus" is "remainder".  Its row is what
-- consumers lock, and never changes but to get an end: a change of the number of partitions
-- makes a new generation that begins where the old one ends.  The number identifies a
-- partition in its batch numbers, which have ten bits for it.
CREATE TABLE idempotency.partition (
	subscription text COLLATE "C" NOT NULL,
	partition integer NOT NULL CHECK (partition BETWEEN 0 AND 1023),
	generation integer NOT NULL,
	remainder integer NOT NULL,
	modulus integer NOT NULL,
	stop pg_snapshot,
	stop_born xid8,
	stop_mark bigint,
	stop_top bigint,
	PRIMARY KEY (subscription, partition)
);
COMMENT ON TABLE idempotency.partition IS 'partitions of subscriptions; consumers lock the row of the partition that they use';
COMMENT ON COLUMN idempotency.partition.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.partition.partition IS 'the number of the partition, unique in the subscription';
COMMENT ON COLUMN idempotency.partition.generation IS 'increases with each change of the number of partitions';
COMMENT ON COLUMN idempotency.partition.remainder IS 'the partition has the buckets with this remainder';
COMMENT ON COLUMN idempotency.partition.modulus IS 'number of partitions of the generation';
COMMENT ON COLUMN idempotency.partition.stop IS 'the partition ends here, as upto of its position; NULL: it does not end';
COMMENT ON COLUMN idempotency.partition.stop_born IS 'upto_born at that end';
COMMENT ON COLUMN idempotency.partition.stop_mark IS 'upto_mark at that end';
COMMENT ON COLUMN idempotency.partition.stop_top IS 'top at that end';
COMMENT ON INDEX idempotency.partition_pkey IS 'one row per partition';

-- The position of each partition: one row, with a greater version after each change.  Readers
-- take the greatest, so that dead versions that an old snapshot keeps do not slow them down.
-- scan.sql explains the columns from base to former_top.
CREATE TABLE idempotency.position (
	subscription text COLLATE "C" NOT NULL,
	partition integer NOT NULL,
	version bigint NOT NULL,
	changed_at timestamptz NOT NULL,
	system_identifier bigint NOT NULL,
	relation oid NOT NULL,
	base pg_snapshot NOT NULL,
	born xid8 NOT NULL,
	mark bigint NOT NULL,
	top bigint NOT NULL,
	xids xid8[] NOT NULL,
	froms bigint[] NOT NULL,
	range_from bigint NOT NULL,
	upto pg_snapshot,
	upto_born xid8,
	upto_mark bigint,
	reached bigint NOT NULL,
	former_base pg_snapshot,
	former_top bigint,
	skip bigint NOT NULL,
	ended boolean NOT NULL,
	events bigint[] NOT NULL,
	size integer NOT NULL,
	retried boolean NOT NULL,
	failures integer NOT NULL,
	alone boolean NOT NULL,
	batch bigint,
	leased_at timestamptz,
	leased_until timestamptz,
	holder integer,
	acknowledged bigint NOT NULL,
	failed bigint NOT NULL,
	failing_since timestamptz,
	PRIMARY KEY (subscription, partition, version)
)
WITH (autovacuum_vacuum_scale_factor = 0.1);
ALTER TABLE idempotency.position ALTER COLUMN events SET STORAGE EXTERNAL;
COMMENT ON TABLE idempotency.position IS 'the position of each partition in the outbox, and its batch';
COMMENT ON COLUMN idempotency.position.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.position.partition IS 'the number of the partition';
COMMENT ON COLUMN idempotency.position.version IS 'increases with each change';
COMMENT ON COLUMN idempotency.position.changed_at IS 'when this version was written';
COMMENT ON COLUMN idempotency.position.system_identifier IS 'the cluster to which the transactions belong';
COMMENT ON COLUMN idempotency.position.relation IS 'OID of the outbox in that cluster';
COMMENT ON COLUMN idempotency.position.base IS 'every event that is visible in it was read';
COMMENT ON COLUMN idempotency.position.born IS 'transactions with this id or a greater one draw numbers above mark';
COMMENT ON COLUMN idempotency.position.mark IS 'the last number that was drawn before base and born';
COMMENT ON COLUMN idempotency.position.top IS 'no event that is visible in base, or in upto, has a greater number';
COMMENT ON COLUMN idempotency.position.xids IS 'transactions that were in progress in base';
COMMENT ON COLUMN idempotency.position.froms IS 'for each of them, a number below its first one';
COMMENT ON COLUMN idempotency.position.range_from IS 'the same for ids from the end of base to born';
COMMENT ON COLUMN idempotency.position.upto IS 'the snapshot whose events are being read; NULL: none';
COMMENT ON COLUMN idempotency.position.upto_born IS 'born, for upto';
COMMENT ON COLUMN idempotency.position.upto_mark IS 'mark, for upto';
COMMENT ON COLUMN idempotency.position.reached IS 'the window was read up to this number';
COMMENT ON COLUMN idempotency.position.former_base IS 'base in the cluster of a dump, whose events are being read; NULL: none';
COMMENT ON COLUMN idempotency.position.former_top IS 'top in that cluster';
COMMENT ON COLUMN idempotency.position.skip IS 'events up to this number are not delivered: seek(), or max_lag';
COMMENT ON COLUMN idempotency.position.ended IS 'the partition has read up to its end';
COMMENT ON COLUMN idempotency.position.events IS 'numbers of the events that were read and not acknowledged, in order';
COMMENT ON COLUMN idempotency.position.size IS 'how many of them are in the batch';
COMMENT ON COLUMN idempotency.position.retried IS 'whether some of them are in idempotency.parked';
COMMENT ON COLUMN idempotency.position.failures IS 'deliveries of these events that failed as a whole';
COMMENT ON COLUMN idempotency.position.alone IS 'whether they are delivered one by one';
COMMENT ON COLUMN idempotency.position.batch IS 'the number of the batch; NULL: none is out';
COMMENT ON COLUMN idempotency.position.leased_at IS 'when the batch was leased';
COMMENT ON COLUMN idempotency.position.leased_until IS 'when the lease ends';
COMMENT ON COLUMN idempotency.position.holder IS 'process id of the session that fetched the batch';
COMMENT ON COLUMN idempotency.position.acknowledged IS 'number of events acknowledged';
COMMENT ON COLUMN idempotency.position.failed IS 'number of deliveries of an event that failed';
COMMENT ON COLUMN idempotency.position.failing_since IS 'since when the log says that events fail; NULL: they do not';
COMMENT ON INDEX idempotency.position_pkey IS 'for reading the newest version';

-- Events that failed, those that wait behind them, events that are not due yet, and dead
-- letters: copies, so that the originals can be deleted.  queue is the aggregate whose order
-- the event keeps.  An event with retry_at is scheduled, one with dead_at is dead, and one
-- with neither waits for an earlier event of its queue.
CREATE TABLE idempotency.parked (
	subscription text COLLATE "C" NOT NULL,
	partition integer NOT NULL,
	seq bigint NOT NULL,
	published_at timestamptz NOT NULL,
	id uuid NOT NULL,
	bucket integer NOT NULL,
	bytes integer NOT NULL,
	queue text COLLATE "C",
	aggregatetype text COLLATE "C" NOT NULL,
	aggregateid text COLLATE "C",
	type text COLLATE "C",
	payload json,
	headers json,
	attempts integer NOT NULL,
	alone boolean NOT NULL,
	error text,
	first_failed_at timestamptz,
	last_failed_at timestamptz,
	retry_at timestamptz CHECK (retry_at IS NULL OR dead_at IS NULL),
	dead_at timestamptz,
	PRIMARY KEY (subscription, seq)
)
WITH (autovacuum_vacuum_scale_factor = 0.1);
COMMENT ON TABLE idempotency.parked IS 'events to retry, events that they block, and dead letters';
COMMENT ON COLUMN idempotency.parked.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.parked.partition IS 'the partition that delivers the event';
COMMENT ON COLUMN idempotency.parked.seq IS 'the event''s number in the outbox';
COMMENT ON COLUMN idempotency.parked.published_at IS 'when the event was published';
COMMENT ON COLUMN idempotency.parked.id IS 'the event''s id';
COMMENT ON COLUMN idempotency.parked.bucket IS 'as in the outbox';
COMMENT ON COLUMN idempotency.parked.bytes IS 'as in the outbox';
COMMENT ON COLUMN idempotency.parked.queue IS 'the aggregate whose order the event keeps; NULL: none';
COMMENT ON COLUMN idempotency.parked.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.parked.aggregateid IS 'the object of the event';
COMMENT ON COLUMN idempotency.parked.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.parked.payload IS 'the payload';
COMMENT ON COLUMN idempotency.parked.headers IS 'metadata';
COMMENT ON COLUMN idempotency.parked.attempts IS 'number of deliveries that failed';
COMMENT ON COLUMN idempotency.parked.alone IS 'whether a lease ended while the event was delivered alone';
COMMENT ON COLUMN idempotency.parked.error IS 'the last error';
COMMENT ON COLUMN idempotency.parked.first_failed_at IS 'when the event first failed';
COMMENT ON COLUMN idempotency.parked.last_failed_at IS 'when the event last failed';
COMMENT ON COLUMN idempotency.parked.retry_at IS 'when the event is delivered; NULL: an earlier event blocks it, or it is a dead letter';
COMMENT ON COLUMN idempotency.parked.dead_at IS 'when the event became a dead letter';
COMMENT ON INDEX idempotency.parked_pkey IS 'one row per event';

CREATE INDEX parked_due ON idempotency.parked (subscription, partition, retry_at, seq) WHERE retry_at IS NOT NULL;
COMMENT ON INDEX idempotency.parked_due IS 'events to deliver, by time';
CREATE INDEX parked_live ON idempotency.parked (subscription, queue, seq) WHERE dead_at IS NULL AND queue IS NOT NULL;
COMMENT ON INDEX idempotency.parked_live IS 'events that block later events of their aggregate';
CREATE UNIQUE INDEX parked_scheduled ON idempotency.parked (subscription, queue) WHERE retry_at IS NOT NULL AND queue IS NOT NULL;
COMMENT ON INDEX idempotency.parked_scheduled IS 'one event of an aggregate is scheduled, and the others wait';

-- Rows of rolled-back subtransactions only, see next_id()
CREATE UNLOGGED TABLE idempotency_internal.probe ();
COMMENT ON TABLE idempotency_internal.probe IS 'empty; an INSERT gives a subtransaction its id';

-- An event as fetch() returns it and handlers receive it.
CREATE TYPE idempotency.event AS (
	batch bigint,
	seq bigint,
	id uuid,
	topic text,
	aggregate_id text,
	type text,
	payload json,
	headers json,
	attempt integer,
	published_at timestamptz
);
COMMENT ON TYPE idempotency.event IS 'an event as it is delivered';
COMMENT ON COLUMN idempotency.event.batch IS 'the batch of the event, for ack()';
COMMENT ON COLUMN idempotency.event.seq IS 'the order in which the events were published';
COMMENT ON COLUMN idempotency.event.id IS 'the event''s id, the same in each delivery';
COMMENT ON COLUMN idempotency.event.topic IS 'the topic';
COMMENT ON COLUMN idempotency.event.aggregate_id IS 'the object of the event';
COMMENT ON COLUMN idempotency.event.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.event.payload IS 'the payload, byte for byte';
COMMENT ON COLUMN idempotency.event.headers IS 'metadata';
COMMENT ON COLUMN idempotency.event.attempt IS '1 for the first delivery, plus 1 for each one that failed';
COMMENT ON COLUMN idempotency.event.published_at IS 'when the event was published';

