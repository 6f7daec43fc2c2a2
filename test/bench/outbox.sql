-- The suite outbox: an order whose transaction publishes an event of some 200 bytes,
-- and the consumer who drains them.  Four contestants: the order alone (floor), the
-- outbox that one would write by hand, idempotency.publish and fetch, and PgQ.  They
-- do the same work in one function, and answer with the same JSON, which is the
-- event's payload.  Their numbers, 0 to 3, are those of the scripts that pgbench plays.

CREATE EXTENSION idempotency;
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

-- What the API answers, and the event's payload.
CREATE FUNCTION bench.body(p_purchase bench.purchase) RETURNS json
LANGUAGE sql STABLE
RETURN json_build_object(
	'id', p_purchase.id, 'customer', p_purchase.customer, 'status', 'created', 'currency', 'EUR',
	'total', p_purchase.quantity * p_purchase.price,
	'sku', p_purchase.sku, 'quantity', p_purchase.quantity, 'price', p_purchase.price,
	'country', 'DE', 'created_at', p_purchase.created_at);

-- floor: the order, and no event.
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

-- hand: a table with a status, and an index on what is pending, so that what is done
-- costs the consumer nothing once VACUUM has been there.
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

-- idempotency: (an assignment, which costs PL/pgSQL less than a PERFORM, for this and
-- for the next)
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

-- Empties the contestants' outboxes, each with one consumer who has read all.  PgQ
-- ticks when it is told to: see bench.fill.
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

-- Publishes so many events of a contestant, each in a transaction of its own.
--
-- PgQ delivers from tick to tick, and pgqd ticks once a second.  Here the publisher
-- makes a tick (pgq.ticker()) after each so many events, so that a batch of PgQ's is as large as
-- the others', however fast this machine is; at 500, which is PgQ's own default for
-- the events of a batch, it is what pgqd would do, if it looked often enough.
-- Nobody counts what the ticks cost, which is in PgQ's favour.
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

-- Drains what is left of a contestant's outbox, and tells how many events it was.
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
		-- it would not tick for an event whose number is old
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

-- Raises an error unless exactly so many events are left.
CREATE PROCEDURE bench.check_rest(p_contestant text, p_events bigint)
LANGUAGE plpgsql AS $$
DECLARE
	rest bigint := bench.drain_rest(p_contestant);
BEGIN
	IF rest <> p_events THEN
		RAISE '% has % events left, not %', p_contestant, rest, p_events;
	END IF;
END $$;

-- The row versions in a contestant's tables that have died so far: what VACUUM, or a
-- reader on his way, has had to take away is counted too.
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
-- What a turn takes
-- ---------------------------------------------------------------------------

-- What a backend had used up when a turn was over.  The first mark is the beginning,
-- and belongs to nobody.
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

-- What each turn took for an event.
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

-- Turns them into samples of the figures x_cpu, x_wal and x_rate, as far as there
-- are such figures.
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

-- Turns the five turns of one contestant into samples of x_first, x_last, x_flat and
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

-- Workers serve as the owner of the subscription, who is no superuser.
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

-- Fetches, waiting for them, and acknowledges so many events.
CREATE PROCEDURE bench.consume(p_events bigint)
LANGUAGE plpgsql AS $$
DECLARE
	fetched idempotency.event[];
BEGIN
	WHILE (SELECT count(*) FROM bench.handled) < p_events LOOP
		fetched := array_agg(e) FROM idempotency.fetch('bench', wait => '30 seconds') AS e;
		IF fetched IS NULL THEN
			RAISE 'there is nothing to fetch';
		END IF;
		INSERT INTO bench.handled SELECT e.id, clock_timestamp() FROM unnest(fetched) AS e;
		PERFORM idempotency.ack('bench', fetched[1].batch);
		COMMIT;
	END LOOP;
END $$;

-- Waits until no worker serves the subscription any more, and a moment longer.
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

-- Waits until so many events have been handled.
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

-- Turns what the handler noted into samples: from the publisher's commit, whose time
-- the server keeps with track_commit_timestamp, to the handler's first statement, both
-- by the server's clock.  Each event counts, in milliseconds.
CREATE PROCEDURE bench.sample_handled(p_round integer, p_figure text, p_events bigint)
LANGUAGE plpgsql AS $$
DECLARE
	latencies double precision[] := array_agg(
			1000 * extract(epoch FROM h.handled_at - pg_xact_commit_timestamp(o.xmin)))
		FROM bench.handled AS h
		JOIN idempotency.outbox AS o USING (id);
BEGIN
	IF coalesce(cardinality(latencies), 0) <> p_events OR array_position(latencies, NULL) IS NOT NULL THEN
		RAISE '% events have been handled, not %', cardinality(latencies), p_events;
	END IF;
	INSERT INTO bench.sample
	SELECT p_round, p_figure || part, 'idempotency', percentile_cont(share) WITHIN GROUP (ORDER BY latency)
	FROM unnest(latencies) AS latency, (VALUES ('', 0.5), ('_p99', 0.99)) AS p (part, share)
	GROUP BY part, share;
	TRUNCATE bench.handled, idempotency.outbox;
END $$;
