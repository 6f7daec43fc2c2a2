-- The suite outbox: an order whose transaction publishes an event of about 200 bytes,
-- and the consumer that drains the events. Four contestants: the order alone (floor), a
-- hand-written outbox, idempotency.publish and fetch, and PgQ. Each does the same work
-- in one function, and returns the same JSON, which is the payload of the event. Their
-- numbers, 0 to 3, are those in the pgbench scripts.

\ir ../edition.sql
CREATE EXTENSION pgq;

INSERT INTO bench.figure (figure, title, unit, above_floor, contestants, reference, at_least, target, absolute) VALUES
	('publish_cpu', 'publish: server CPU above the floor (ratio to PgQ)', 'us', true, '{floor,hand,pgq,idempotency}', 'pgq', false, 0.6, false),
	('publish_wal', 'publish: WAL above the floor (ratio to PgQ)', 'bytes', true, '{floor,hand,pgq,idempotency}', 'pgq', false, 1.1, false),
	('drain_rate', 'drain, batches of 100: events', 'per second', false, '{hand,pgq,idempotency}', 'hand', true, 1, false),
	('drain_cpu', 'drain, batches of 100: server CPU per event', 'us', false, '{hand,pgq,idempotency}', 'hand', false, 0.8, false),
	('drain_wal', 'drain, batches of 100: WAL per event', 'bytes', false, '{hand,pgq,idempotency}', 'hand', false, 0.05, false),
	('drain_dead', 'drain, batches of 100: dead tuples made per event', 'tuples', false, '{hand,pgq,idempotency}', 'hand', false, 0.05, true),
	('drain500_rate', 'drain, batches of 500: events (ratio to PgQ)', 'per second', false, '{hand,pgq,idempotency}', 'pgq', true, 1, false),
	('drain500_cpu', 'drain, batches of 500: server CPU per event (ratio to PgQ)', 'us', false, '{hand,pgq,idempotency}', 'pgq', false, NULL, false),
	('drain5000_rate', 'drain, batches of 5000: events (ratio to PgQ)', 'per second', false, '{hand,pgq,idempotency}', 'pgq', true, NULL, false),
	('drain5000_cpu', 'drain, batches of 5000: server CPU per event (ratio to PgQ)', 'us', false, '{hand,pgq,idempotency}', 'pgq', false, NULL, false),
	('snapshot_first', 'drain while a snapshot is held: first fifth', 'per second', false, '{hand,pgq,idempotency}', 'hand', true, NULL, false),
	('snapshot_last', 'drain while a snapshot is held: last fifth', 'per second', false, '{hand,pgq,idempotency}', 'hand', true, NULL, false),
	('snapshot_flat', 'the second, of the first', 'times', false, '{hand,pgq,idempotency}', 'hand', true, 0.9, true),
	('snapshot_cpu', 'server CPU per event in the last, of the first', 'times', false, '{hand,pgq,idempotency}', 'hand', false, NULL, true),
	('xid_first', 'drain while a publisher is open: first fifth', 'per second', false, '{hand,pgq,idempotency}', 'hand', true, NULL, false),
	('xid_last', 'drain while a publisher is open: last fifth', 'per second', false, '{hand,pgq,idempotency}', 'hand', true, NULL, false),
	('xid_flat', 'the second, of the first', 'times', false, '{hand,pgq,idempotency}', 'hand', true, 0.9, true),
	('xid_cpu', 'server CPU per event in the last, of the first', 'times', false, '{hand,pgq,idempotency}', 'hand', false, NULL, true),
	('waiting', 'commit to a consumer who waits in fetch: median', 'ms', false, '{idempotency}', 'hand', false, NULL, true),
	('waiting_p99', 'commit to a consumer who waits in fetch: p99', 'ms', false, '{idempotency}', 'hand', false, NULL, true),
	('idle', 'commit to handler, idle before: median', 'ms', false, '{idempotency}', 'hand', false, NULL, true),
	('idle_p99', 'commit to handler, idle before: p99', 'ms', false, '{idempotency}', 'hand', false, 20, true),
	('busy', 'commit to handler, a steady flow: median', 'ms', false, '{idempotency}', 'hand', false, NULL, true),
	('busy_p99', 'commit to handler, a steady flow: p99', 'ms', false, '{idempotency}', 'hand', false, NULL, true);

-- ---------------------------------------------------------------------------
-- Publishing
-- ---------------------------------------------------------------------------

-- The business table.
CREATE TABLE bench.purchase (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer integer NOT NULL,
	sku text NOT NULL,
	quantity integer NOT NULL,
	price numeric(12, 2) NOT NULL,
	created_at timestamptz NOT NULL DEFAULT now()
);

-- The response of the API, and the payload of the event.
CREATE FUNCTION bench.body(p_purchase bench.purchase) RETURNS json
LANGUAGE sql STABLE
RETURN json_build_object(
	'id', p_purchase.id, 'customer', p_purchase.customer, 'status', 'created', 'currency', 'EUR',
	'total', p_purchase.quantity * p_purchase.price,
	'sku', p_purchase.sku, 'quantity', p_purchase.quantity, 'price', p_purchase.price,
	'country', 'DE', 'created_at', p_purchase.created_at);

-- floor: the order without an event.
CREATE FUNCTION bench.order_0(p_customer integer, p_sku text, p_quantity integer, p_price numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	purchase bigint;
	body json;
BEGIN
	INSERT INTO bench.purchase AS p (customer, sku, quantity, price)
	VALUES (p_customer, p_sku, p_quantity, p_price)
	RETURNING id, bench.body(p) INTO purchase, body;
	RETURN body;
END $$;

-- hand: a table with a status, and an index on pending rows, so that finished rows cost
-- the consumer nothing after VACUUM.
CREATE TABLE bench.hand_outbox (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	topic text NOT NULL,
	aggregate_id text NOT NULL,
	type text NOT NULL,
	payload json NOT NULL,
	status text NOT NULL DEFAULT 'pending',
	created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON bench.hand_outbox (id) WHERE status = 'pending';

CREATE FUNCTION bench.order_1(p_customer integer, p_sku text, p_quantity integer, p_price numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	purchase bigint;
	body json;
BEGIN
	INSERT INTO bench.purchase AS p (customer, sku, quantity, price)
	VALUES (p_customer, p_sku, p_quantity, p_price)
	RETURNING id, bench.body(p) INTO purchase, body;

	INSERT INTO bench.hand_outbox (topic, aggregate_id, type, payload)
	VALUES ('order.created', purchase, 'OrderCreated', body);
	RETURN body;
END $$;

-- idempotency. An assignment costs PL/pgSQL less than a PERFORM; the same for pgq.
CREATE FUNCTION bench.order_2(p_customer integer, p_sku text, p_quantity integer, p_price numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	purchase bigint;
	body json;
	event uuid;
BEGIN
	INSERT INTO bench.purchase AS p (customer, sku, quantity, price)
	VALUES (p_customer, p_sku, p_quantity, p_price)
	RETURNING id, bench.body(p) INTO purchase, body;

	event := idempotency.publish('order.created', body, purchase::text, 'OrderCreated');
	RETURN body;
END $$;

-- pgq
CREATE FUNCTION bench.order_3(p_customer integer, p_sku text, p_quantity integer, p_price numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	purchase bigint;
	body json;
	event bigint;
BEGIN
	INSERT INTO bench.purchase AS p (customer, sku, quantity, price)
	VALUES (p_customer, p_sku, p_quantity, p_price)
	RETURNING id, bench.body(p) INTO purchase, body;

	event := pgq.insert_event('outbox', 'OrderCreated', body::text, 'order.created', purchase::text, NULL, NULL);
	RETURN body;
END $$;

-- ---------------------------------------------------------------------------
-- Draining
-- ---------------------------------------------------------------------------

-- Empties the contestants' outboxes; each has one consumer, which has read all events.
-- PgQ ticks only on request: see bench.fill.
CREATE PROCEDURE bench.empty_outboxes()
LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE bench.purchase, bench.hand_outbox RESTART IDENTITY;

	PERFORM idempotency.unsubscribe('bench');
	TRUNCATE idempotency.outbox;
	PERFORM idempotency.subscribe('bench', '{order.*}');

	IF EXISTS (SELECT FROM pgq.queue WHERE queue_name = 'outbox') THEN
		PERFORM pgq.unregister_consumer('outbox', 'bench'), pgq.drop_queue('outbox');
	END IF;
	PERFORM pgq.create_queue('outbox');
	PERFORM pgq.set_queue_config('outbox', 'ticker_max_lag', '0');
	PERFORM pgq.register_consumer('outbox', 'bench');
END $$;

-- Publishes that many events of a contestant, each in its own transaction.
--
-- PgQ delivers from tick to tick, and pgqd ticks once a second. Here the publisher
-- makes a tick (pgq.ticker()) after each that many events, so that PgQ's batches are as
-- large as the others', however fast the machine is. With 500, PgQ's default number of
-- events per batch, pgqd would do the same if it polled often enough. The cost of the
-- ticks is not counted, which favours PgQ.
CREATE PROCEDURE bench.fill(p_contestant text, p_events integer, p_batch integer)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. p_events LOOP
		IF p_contestant = 'hand' THEN
			PERFORM bench.order_1(i % 1000, 'A-' || i % 9000, 1 + i % 9, 19.90);
		ELSIF p_contestant = 'idempotency' THEN
			PERFORM bench.order_2(i % 1000, 'A-' || i % 9000, 1 + i % 9, 19.90);
		ELSE
			PERFORM bench.order_3(i % 1000, 'A-' || i % 9000, 1 + i % 9, 19.90);
			IF i % p_batch = 0 THEN
				COMMIT;
				PERFORM pgq.ticker('outbox');
			END IF;
		END IF;
		COMMIT;
	END LOOP;
END $$;

-- Drains the remaining events of a contestant's outbox, and returns their number.
CREATE FUNCTION bench.drain_rest(p_contestant text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	rest bigint := 0;
	events bigint;
	taken bigint;
BEGIN
	IF p_contestant = 'hand' THEN
		UPDATE bench.hand_outbox SET status = 'done' WHERE status = 'pending';
		GET DIAGNOSTICS rest = ROW_COUNT;
	ELSIF p_contestant = 'idempotency' THEN
		LOOP
			SELECT min(batch), count(*) INTO taken, events FROM idempotency.fetch('bench', 1000);
			EXIT WHEN events = 0;
			PERFORM idempotency.ack('bench', taken);
			rest := rest + events;
		END LOOP;
	ELSE
		-- The ticker would not tick for an event with an old number.
		PERFORM pgq.force_tick('outbox'), pgq.ticker('outbox');
		LOOP
			taken := pgq.next_batch('outbox', 'bench');
			EXIT WHEN taken IS NULL;
			rest := rest + (SELECT count(*) FROM pgq.get_batch_events(taken));
			PERFORM pgq.finish_batch(taken);
		END LOOP;
	END IF;
	RETURN rest;
END $$;

-- Raises an error unless exactly that many events are left.
CREATE PROCEDURE bench.check_rest(p_contestant text, p_events bigint)
LANGUAGE plpgsql AS $$
DECLARE
	rest bigint := bench.drain_rest(p_contestant);
BEGIN
	IF rest <> p_events THEN
		RAISE '% has % events left, not %', p_contestant, rest, p_events;
	END IF;
END $$;

-- The number of dead row versions in a contestant's tables so far, including those that
-- VACUUM or page pruning already removed.
CREATE FUNCTION bench.died(p_contestant text) RETURNS bigint
LANGUAGE sql STABLE
RETURN (
	SELECT sum(pg_stat_get_tuples_updated(oid) + pg_stat_get_tuples_deleted(oid))
	FROM pg_class
	WHERE relkind = 'r' AND CASE p_contestant
		WHEN 'hand' THEN oid = 'bench.hand_outbox'::regclass
		ELSE relnamespace = p_contestant::regnamespace
	END);

-- ---------------------------------------------------------------------------
-- Resources of a turn
-- ---------------------------------------------------------------------------

-- The resources that a backend had used at the end of a turn. The first mark is the
-- start, and belongs to no turn.
CREATE UNLOGGED TABLE bench.turn (
	position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	pid integer NOT NULL,
	turn integer,
	cpu double precision NOT NULL,
	wal pg_lsn NOT NULL,
	ended_at timestamptz NOT NULL
);

CREATE FUNCTION bench.end_turn(p_turn integer) RETURNS void
LANGUAGE sql
BEGIN ATOMIC
	INSERT INTO bench.turn (pid, turn, cpu, wal, ended_at)
	VALUES (pg_backend_pid(), p_turn, bench.cpu(), pg_current_wal_insert_lsn(), clock_timestamp());
END;

-- The resources per event of each turn.
CREATE FUNCTION bench.turns(p_events integer) RETURNS TABLE (number bigint, turn integer,
	cpu double precision, wal double precision, rate double precision)
LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT count(DISTINCT pid) <> 1 OR count(*) < 2 OR count(*) FILTER (WHERE t.turn IS NULL) <> 1
		FROM bench.turn AS t) THEN
		RAISE 'there are no turns, or turns of several backends';
	END IF;

	RETURN QUERY
	SELECT row_number() OVER before - 1, t.turn,
		(t.cpu - lag(t.cpu) OVER before) / p_events,
		((t.wal - lag(t.wal) OVER before) / p_events)::double precision,
		p_events / extract(epoch FROM t.ended_at - lag(t.ended_at) OVER before)::double precision
	FROM bench.turn AS t
	WINDOW before AS (ORDER BY position)
	OFFSET 1;
END $$;

-- Converts the marks into samples of the figures x_cpu, x_wal and x_rate, if such
-- figures exist.
CREATE PROCEDURE bench.sample_turns(p_round integer, p_figure text, p_contestants text[], p_events integer)
LANGUAGE sql
BEGIN ATOMIC
	INSERT INTO bench.sample
	SELECT p_round, p_figure || part, p_contestants[t.turn + 1], value
	FROM bench.turns(p_events) AS t,
		LATERAL (VALUES ('_cpu', t.cpu), ('_wal', t.wal), ('_rate', t.rate)) AS v (part, value)
	WHERE EXISTS (SELECT FROM bench.figure AS f WHERE f.figure = p_figure || part);
	DELETE FROM bench.turn;
END;

-- Converts the five turns of one contestant into samples of x_first, x_last, x_flat and
-- x_cpu.
CREATE PROCEDURE bench.sample_fifths(p_round integer, p_figure text, p_contestant text, p_events integer)
LANGUAGE plpgsql AS $$
DECLARE
	rates double precision[];
	cpu double precision[];
BEGIN
	SELECT array_agg(t.rate ORDER BY number), array_agg(t.cpu ORDER BY number) INTO rates, cpu
	FROM bench.turns(p_events) AS t;
	IF cardinality(rates) <> 5 THEN
		RAISE '% fifths', cardinality(rates);
	END IF;
	INSERT INTO bench.sample VALUES
		(p_round, p_figure || '_first', p_contestant, rates[1]),
		(p_round, p_figure || '_last', p_contestant, rates[5]),
		(p_round, p_figure || '_flat', p_contestant, rates[5] / rates[1]),
		(p_round, p_figure || '_cpu', p_contestant, cpu[5] / cpu[1]);
	DELETE FROM bench.turn;
END $$;

-- ---------------------------------------------------------------------------
-- Latency
-- ---------------------------------------------------------------------------

-- Workers run as the owner of the subscription, which is not a superuser.
CREATE ROLE bench_consumer LOGIN;
DO $$ BEGIN
	PERFORM idempotency.grant_consumer('bench_consumer');
END $$;

CREATE TABLE bench.handled (
	id uuid PRIMARY KEY,
	handled_at timestamptz NOT NULL
);
GRANT USAGE ON SCHEMA bench TO bench_consumer;
GRANT INSERT ON bench.handled TO bench_consumer;

-- The handler.
CREATE FUNCTION bench.handle(p_event idempotency.event) RETURNS void
LANGUAGE sql
BEGIN ATOMIC
	INSERT INTO bench.handled VALUES ((p_event).id, clock_timestamp());
END;

-- Fetches that many events, waiting for them, and acknowledges them.
CREATE PROCEDURE bench.consume(p_events bigint)
LANGUAGE plpgsql AS $$
DECLARE
	fetched idempotency.event[];
BEGIN
	WHILE (SELECT count(*) FROM bench.handled) < p_events LOOP
		fetched := array_agg(e) FROM idempotency.fetch('bench', wait => '30 seconds') AS e;
		-- The first call can only have moved on
		IF fetched IS NULL THEN
			COMMIT;
			fetched := array_agg(e) FROM idempotency.fetch('bench', wait => '30 seconds') AS e;
		END IF;
		IF fetched IS NULL THEN
			RAISE 'there is nothing to fetch';
		END IF;
		INSERT INTO bench.handled SELECT e.id, clock_timestamp() FROM unnest(fetched) AS e;
		PERFORM idempotency.ack('bench', fetched[1].batch);
		COMMIT;
	END LOOP;
END $$;

-- Waits until no worker runs for the subscription, and a moment longer.
CREATE PROCEDURE bench.await_idle()
LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '30 seconds';
BEGIN
	WHILE EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idempotency relay') LOOP
		IF clock_timestamp() > deadline THEN
			RAISE 'the relay does not leave';
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.01);
	END LOOP;
	PERFORM pg_sleep(0.05 + random() / 10);
END $$;

-- Waits until that many events have been handled.
CREATE PROCEDURE bench.await_handled(p_events bigint)
LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '30 seconds';
BEGIN
	WHILE (SELECT count(*) FROM bench.handled) < p_events LOOP
		IF clock_timestamp() > deadline THEN
			RAISE '% events have been handled, not %', (SELECT count(*) FROM bench.handled), p_events;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.005);
	END LOOP;
END $$;

-- Converts the records of the handler into samples, in milliseconds: from the
-- publisher's commit, whose time the server stores with track_commit_timestamp, to the
-- handler's first statement, both by the server's clock. Each event counts but the first
-- ones, which waited for the start of a worker.
CREATE PROCEDURE bench.sample_handled(p_round integer, p_figure text, p_events bigint, p_first integer DEFAULT 0)
LANGUAGE plpgsql AS $$
DECLARE
	latencies double precision[] := array_agg(
			1000 * extract(epoch FROM h.handled_at - pg_xact_commit_timestamp(o.xmin)) ORDER BY o.seq)
		FROM bench.handled AS h
		JOIN idempotency.outbox AS o USING (id);
BEGIN
	IF coalesce(cardinality(latencies), 0) <> p_events OR array_position(latencies, NULL) IS NOT NULL THEN
		RAISE '% events have been handled, not %', cardinality(latencies), p_events;
	END IF;
	INSERT INTO bench.sample
	SELECT p_round, p_figure || part, 'idempotency', percentile_cont(share) WITHIN GROUP (ORDER BY latency)
	FROM unnest(latencies[p_first + 1:]) AS latency, (VALUES ('', 0.5), ('_p99', 0.99)) AS p (part, share)
	GROUP BY part, share;
	TRUNCATE bench.handled, idempotency.outbox;
END $$;
