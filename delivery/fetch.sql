-- ---------------------------------------------------------------------------
-- Batches
-- ---------------------------------------------------------------------------

-- Nothing may discard a write silently: events would be lost.
CREATE FUNCTION idempotency_internal.raise_altered(relation text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('55000', format('table "idempotency.%s" has been altered', $1),
		'A trigger, a rule or a policy has discarded a row.', 'Drop it.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_altered(text) IS '55000: a row was not written';

-- Writes a changed position, in place of the version that was read under the partition's lock; without
-- events of a batch, without its lease.  The number of an empty batch stays for a late ack().
CREATE FUNCTION idempotency_internal.put_position(p idempotency.position)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	IF p.batch IS NULL THEN
		p.size := 0;
	END IF;
	IF p.size = 0 THEN
		p.leased_at := NULL;
		p.leased_until := NULL;
		p.holder := NULL;
	END IF;
	UPDATE idempotency.position AS o SET
		(version, changed_at, system_identifier, relation, base, born, mark, top, xids, froms, range_from, upto, upto_born, upto_mark, reached,
			former_base, former_top, skip, ended, events, size, retried, failures, alone, batch, leased_at, leased_until, holder, acknowledged, failed, failing_since)
		= ROW (p.version + 1, clock_timestamp(), p.system_identifier, p.relation, p.base, p.born, p.mark, p.top, p.xids, p.froms, p.range_from,
			p.upto, p.upto_born, p.upto_mark, p.reached, p.former_base, p.former_top, p.skip, p.ended, p.events, p.size, p.retried, p.failures,
			p.alone, p.batch, p.leased_at, p.leased_until, p.holder, p.acknowledged, p.failed, p.failing_since)
	WHERE o.subscription = p.subscription AND o.partition = p.partition AND o.version = p.version;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise_altered('position');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.put_position(idempotency.position) IS 'write a position';

-- Of the live events of an aggregate, the earliest is scheduled, and all others wait: whatever
-- writes the table of parked events calls this.  "wanted" is when the event "seq" is retried.
CREATE FUNCTION idempotency_internal.schedule_queue(name text, aggregate text, p_seq bigint, wanted timestamptz)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	first bigint;
BEGIN
	SELECT k.seq INTO first FROM idempotency.parked AS k
	WHERE k.subscription = name AND k.queue = aggregate AND k.dead_at IS NULL
	ORDER BY k.seq LIMIT 1;
	UPDATE idempotency.parked AS k SET retry_at = NULL
	WHERE k.subscription = name AND k.queue = aggregate AND k.retry_at IS NOT NULL AND k.seq <> first;
	UPDATE idempotency.parked AS k SET retry_at = CASE k.seq WHEN p_seq THEN wanted ELSE clock_timestamp() END
	WHERE k.subscription = name AND k.seq = first AND k.retry_at IS NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.schedule_queue(text, text, bigint, timestamptz) IS 'schedule the earliest event of an aggregate';

-- Whether a partition has events that failed and are retried.
CREATE FUNCTION idempotency_internal.has_failed(p idempotency.position, but bigint)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN EXISTS (SELECT FROM idempotency.parked AS k
		WHERE k.subscription = (p).subscription AND k.partition = (p).partition AND k.retry_at IS NOT NULL AND k.attempts > 0 AND k.seq <> but);
COMMENT ON FUNCTION idempotency_internal.has_failed(idempotency.position, bigint) IS 'whether another event than this one is retried';

-- Parks an event of the batch that failed, with all later events of its aggregate in the list.
-- An event that cannot be found any more only leaves the list.
CREATE FUNCTION idempotency_internal.fail_event(
	s idempotency.subscription, INOUT p idempotency.position, p_seq bigint, p_error text, retry_in interval, is_final boolean, was_alone boolean,
	OUT retry_at timestamptz)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	now timestamptz := clock_timestamp();
	behind bigint[];
	leaving bigint[];
	event idempotency.parked;
	aggregate text;
BEGIN
	-- Those that leave the list, and copies of those that are in the log
	SELECT coalesce(k.aggregateid, o.aggregateid) INTO aggregate
	FROM (SELECT p_seq AS seq) AS l
	LEFT JOIN idempotency.parked AS k ON k.subscription = p.subscription AND k.seq = l.seq
	LEFT JOIN idempotency.outbox AS o ON o.seq = l.seq;
	leaving := ARRAY[p_seq];
	IF aggregate IS NOT NULL THEN
		behind := p.events[array_position(p.events, p_seq) + 1 :];
		leaving := leaving || ARRAY(SELECT o.seq FROM idempotency.outbox AS o WHERE o.seq = ANY (behind) AND o.aggregateid = aggregate)
			|| ARRAY(SELECT k.seq FROM idempotency.parked AS k
				WHERE k.subscription = p.subscription AND k.seq = ANY (behind) AND k.aggregateid = aggregate);
	END IF;
	UPDATE idempotency.parked AS k SET
		attempts = k.attempts + p.failures,
		retry_at = CASE WHEN k.dead_at IS NOT NULL AND k.queue IS NULL THEN now ELSE k.retry_at END,
		dead_at = NULL
	WHERE k.subscription = p.subscription AND k.seq = ANY (leaving);
	INSERT INTO idempotency.parked (subscription, partition, seq, published_at, id, bucket, bytes, queue, aggregatetype, aggregateid,
		type, payload, headers, attempts, alone, retry_at)
	SELECT p.subscription, p.partition, o.seq, o.published_at, o.id, o.bucket, o.bytes, CASE WHEN o.deliver_at IS NULL THEN o.aggregateid END,
		o.aggregatetype, o.aggregateid, o.type, o.payload, o.headers, p.failures, false,
		CASE WHEN o.deliver_at IS NOT NULL OR o.aggregateid IS NULL THEN now END
	FROM idempotency.outbox AS o
	WHERE o.seq = ANY (leaving)
	ON CONFLICT (subscription, seq) DO NOTHING;
	IF EXISTS (SELECT FROM idempotency.outbox AS o
		WHERE o.seq = ANY (leaving) AND NOT EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = o.seq)) THEN
		PERFORM idempotency_internal.raise_altered('parked');
	END IF;

	-- The event that failed
	SELECT * INTO event FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = p_seq;
	is_final := is_final OR event.attempts + 1 >= s.max_attempts;
	IF NOT is_final THEN
		-- in seconds, at most a century: the product of an interval can be out of range
		retry_at := now + coalesce(retry_in, make_interval(secs => (0.5 + random() / 2) * least(3155760000,
			extract(epoch FROM s.max_retry_delay)::double precision,
			extract(epoch FROM s.retry_delay)::double precision * power(2, least(event.attempts, 30)))));
	END IF;
	UPDATE idempotency.parked AS k SET
		attempts = event.attempts + 1,
		alone = was_alone,
		error = idempotency_internal.clipped_error(p_error),
		first_failed_at = coalesce(event.first_failed_at, now),
		last_failed_at = now,
		retry_at = CASE WHEN event.queue IS NULL THEN fail_event.retry_at END,
		dead_at = CASE WHEN is_final THEN now END
	WHERE k.subscription = p.subscription AND k.seq = p_seq;
	IF event.queue IS NOT NULL THEN
		PERFORM idempotency_internal.schedule_queue(p.subscription, event.queue, p_seq, retry_at);
	ELSIF aggregate IS NOT NULL THEN
		PERFORM idempotency_internal.schedule_queue(p.subscription, aggregate, NULL, NULL);
	END IF;

	-- The log has one line when events begin to fail, and one when they do no longer, both at most once a minute.
	IF p.failing_since IS NULL OR p.failing_since < now - interval '1 minute' AND event.attempts = 0 AND NOT idempotency_internal.has_failed(p, p_seq) THEN
		RAISE LOG 'events of idempotency subscription "%" fail in partition %, first event %', p.subscription, p.partition, event.id USING
			DETAIL = coalesce(left(p_error, 500), ''),
			HINT = 'The views idempotency.subscriptions and idempotency.dead_letters show how many, and the last error.';
		p.failing_since := now;
	END IF;

	-- What is left of the batch
	p.failed := p.failed + 1;
	-- extension only
	PERFORM idempotency_internal.count_events('failed', 1), idempotency_internal.count_events('dead_letters', is_final::integer);
	-- both editions
	p.size := p.size - (SELECT count(*) FROM unnest(p.events[1 : p.size]) AS l (seq) WHERE l.seq = ANY (leaving));
	p.events := ARRAY(SELECT l.seq FROM unnest(p.events) WITH ORDINALITY AS l (seq, n) WHERE l.seq <> ALL (leaving) ORDER BY l.n);
END
$$;
COMMENT ON FUNCTION idempotency_internal.fail_event(idempotency.subscription, idempotency.position, bigint, text, interval, boolean, boolean) IS
	'park an event that failed, with the later ones of its aggregate';

-- Fills an empty list with parked events that are due, each with those that wait behind it.  An
-- event that was alone when a lease ended is delivered alone again.
CREATE FUNCTION idempotency_internal.take_parked(INOUT p idempotency.position, max_events integer, INOUT max_bytes bigint)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	head record;
	next record;
BEGIN
	FOR head IN
		SELECT k.seq, k.queue, k.alone, k.bytes FROM idempotency.parked AS k
		WHERE k.subscription = p.subscription AND k.partition = p.partition AND k.retry_at <= clock_timestamp()
		ORDER BY k.retry_at, k.seq
		LIMIT max_events
	LOOP
		EXIT WHEN p.events <> '{}' AND (head.alone OR head.bytes > max_bytes OR cardinality(p.events) >= max_events);
		p.events := p.events || head.seq;
		p.retried := true;
		p.alone := head.alone;
		max_bytes := max_bytes - head.bytes;
		EXIT WHEN head.alone;
		FOR next IN
			SELECT k.seq, k.alone, k.bytes FROM idempotency.parked AS k
			WHERE k.subscription = p.subscription AND k.queue = head.queue AND k.dead_at IS NULL AND k.seq > head.seq
			ORDER BY k.seq
			LIMIT max_events - cardinality(p.events)
		LOOP
			EXIT WHEN next.alone OR next.bytes > max_bytes;
			p.events := p.events || next.seq;
			max_bytes := max_bytes - next.bytes;
		END LOOP;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.take_parked(idempotency.position, integer, bigint) IS 'add parked events that are due to the list';

-- Deletes the partitions before a change of their number when they have delivered everything,
-- so that those after it begin.  These get the parked events, which keep their order by aggregate.
CREATE FUNCTION idempotency_internal.end_generation(name text, oldest integer)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	locked integer[];
BEGIN
	-- Before the locks, which a fetch() that waits must not have, and under them
	FOR look IN 1 .. 2 LOOP
		IF EXISTS (
				SELECT FROM idempotency.partition AS a
				CROSS JOIN LATERAL (SELECT n.* FROM idempotency.position AS n
					WHERE n.subscription = a.subscription AND n.partition = a.partition ORDER BY n.version DESC LIMIT 1) AS n
				WHERE a.subscription = name AND a.generation = oldest AND (a.partition <> ALL (locked) OR NOT n.ended OR n.events <> '{}')) THEN
			RETURN false;
		ELSIF look = 1 THEN
			locked := ARRAY(SELECT a.partition FROM idempotency.partition AS a
				WHERE a.subscription = name AND a.generation = oldest AND a.stop IS NOT NULL FOR UPDATE SKIP LOCKED);
		END IF;
	END LOOP;
	IF locked = '{}' THEN
		RETURN false;
	END IF;
	UPDATE idempotency.parked AS k SET partition = a.partition
	FROM idempotency.partition AS a
	WHERE k.subscription = name AND k.dead_at IS NULL AND a.subscription = name AND a.remainder = k.bucket % a.modulus
		AND a.generation = (SELECT min(g.generation) FROM idempotency.partition AS g WHERE g.subscription = name AND g.generation > oldest);
	DELETE FROM idempotency.position AS n WHERE n.subscription = name AND n.partition = ANY (locked);
	DELETE FROM idempotency.partition AS a WHERE a.subscription = name AND a.partition = ANY (locked);
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency_internal.end_generation(text, integer) IS
	'delete partitions that have delivered everything up to their end';

-- Takes the next batch of a partition that the transaction has locked, and returns its position, whose
-- batch is NULL if there are no events.
CREATE FUNCTION idempotency_internal.next_batch(
	s idempotency.subscription, part idempotency.partition, INOUT p idempotency.position, number bigint, max_events integer, max_bytes bigint,
	now timestamptz, lease_end timestamptz, drawn bigint, born xid8)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	has_parked boolean;
	taken record;
BEGIN
	-- A batch whose lease is over has failed.  From the second time on its events are delivered
	-- one by one, and then one fails by itself.
	IF p.size > 0
		-- extension only
		AND NOT (p.leased_until = 'infinity' AND idempotency_internal.was_given_back(p.batch))
		-- both editions
	THEN
		-- extension only
		PERFORM idempotency_internal.count_events('batches_expired', 1);
		-- both editions
		IF p.alone THEN
			RAISE LOG 'a consumer of idempotency subscription "%" ended, or its lease did, while it had the event with number % alone',
				s.subscription, p.events[1];
			p := (idempotency_internal.fail_event(s, p, p.events[1],
				CASE WHEN isfinite(p.leased_until) THEN format('the lease ended without ack() or nack(); process %s had the event', p.holder)
					ELSE 'the worker ended while it handled this event' END, NULL, false, true)).p;
		ELSE
			p.failures := p.failures + 1;
			p.failed := p.failed + p.size;
			p.alone := p.failures >= 2;
			-- extension only
			PERFORM idempotency_internal.count_events('failed', p.size);
			-- both editions
		END IF;
	END IF;
	p.batch := NULL;
	IF p.events = '{}' THEN
		p.failures := 0;
		p.alone := false;
		p.retried := false;
		-- of events that live, one is scheduled
		has_parked := EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.retry_at IS NOT NULL);
		IF has_parked THEN
			taken := idempotency_internal.take_parked(p, max_events, max_bytes);
			p := taken.p;
			max_bytes := taken.max_bytes;
		END IF;
		IF NOT p.alone THEN
			p := idempotency_internal.read_log(p, part, s.patterns, max_events, max_bytes, drawn, born, has_parked);
		END IF;
	END IF;
	IF p.events <> '{}' THEN
		p.size := CASE WHEN p.alone THEN 1 ELSE cardinality(p.events) END;
		p.batch := number;
		p.leased_at := now;
		p.leased_until := lease_end;
		p.holder := pg_backend_pid();
	END IF;
	PERFORM idempotency_internal.put_position(p);
END
$$;
COMMENT ON FUNCTION idempotency_internal.next_batch(idempotency.subscription, idempotency.partition, idempotency.position, bigint, integer, bigint,
	timestamptz, timestamptz, bigint, xid8) IS
	'take the next batch of a locked partition';

-- The partitions from which fetch() can take something.
CREATE FUNCTION idempotency_internal.due_partitions(s idempotency.subscription)
	RETURNS SETOF integer
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT a.partition
	FROM idempotency.partition AS a
	CROSS JOIN LATERAL (SELECT o AS position FROM idempotency.position AS o
		WHERE o.subscription = a.subscription AND o.partition = a.partition ORDER BY o.version DESC LIMIT 1) AS n
	WHERE a.subscription = $1.subscription AND $1.paused_at IS NULL
		AND a.generation = (SELECT min(g.generation) FROM idempotency.partition AS g WHERE g.subscription = $1.subscription)
		AND idempotency_internal.is_due(n.position, a.stop IS NOT NULL, a.modulus, a.remainder, $1.patterns)
$$;
COMMENT ON FUNCTION idempotency_internal.due_partitions(idempotency.subscription) IS 'partitions that have something for fetch()';

-- extension only
-- When the next parked event is due.  One that is due is in a partition whose batch is out.
-- In PL/pgSQL, so that a session plans it once.
CREATE FUNCTION idempotency_internal.next_retry(name text)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	RETURN (SELECT min(k.retry_at)
		FROM idempotency.partition AS a
		CROSS JOIN LATERAL (SELECT e.retry_at FROM idempotency.parked AS e
			WHERE e.subscription = a.subscription AND e.partition = a.partition AND e.retry_at > clock_timestamp()
			ORDER BY e.retry_at LIMIT 1) AS k
		WHERE a.subscription = name COLLATE "C");
END
$$;
COMMENT ON FUNCTION idempotency_internal.next_retry(text) IS 'when a waiting consumer must look again';

CREATE FUNCTION idempotency_internal.next_due(name text)
	RETURNS timestamptz
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT least(idempotency_internal.next_retry($1), min(n.leased_until))
	FROM idempotency.position AS n
	WHERE n.subscription = $1 COLLATE "C" AND n.leased_until > clock_timestamp() AND isfinite(n.leased_until)
$$;
COMMENT ON FUNCTION idempotency_internal.next_due(text) IS 'when a worker must look again';

-- The subscriptions for which workers can be started, and those that have something to deliver.
CREATE FUNCTION idempotency_internal.survey()
	RETURNS TABLE (subscription text, owner name, topics text[], partitions integer, is_due boolean, due_at timestamptz)
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT s.subscription, s.owner, s.topics, (SELECT max(a.modulus) FROM idempotency.partition AS a WHERE a.subscription = s.subscription),
		EXISTS (SELECT FROM idempotency_internal.due_partitions(s)),
		idempotency_internal.next_due(s.subscription)
	FROM idempotency.subscription AS s
	WHERE s.handler IS NOT NULL
$$;
COMMENT ON FUNCTION idempotency_internal.survey() IS 'subscriptions with a handler';

-- both editions
CREATE FUNCTION idempotency.fetch(
	subscription text, max_events integer DEFAULT 100, wait interval DEFAULT '0', lease interval DEFAULT '30 seconds',
	max_bytes bigint DEFAULT 10485760)
	RETURNS SETOF idempotency.event
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100 SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
	s idempotency.subscription;
	deadline timestamptz := clock_timestamp() + wait;
	pause double precision := 0.01;
	now timestamptz;
	lease_end timestamptz;
	next record;
	part idempotency.partition;
	p idempotency.position;
	drawn bigint;
	born xid8;
	start bigint;
	number bigint;
	numbers bigint[];
	oldest integer;
	is_ending boolean;
	changed boolean;
	moved boolean := false;
BEGIN
	-- Check the arguments
	IF (max_events >= 1) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', 'max_events must be positive', NULL, 'Pass the maximum number of events.');
	ELSIF (max_bytes >= 1) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', 'max_bytes must be positive', NULL, 'Pass the maximum number of bytes; one event always fits.');
	ELSIF wait < interval '0' THEN
		PERFORM idempotency_internal.raise('22023', 'wait must not be negative', NULL, 'Pass 0 to not wait.');
	ELSIF (lease > interval '0' AND lease < interval '1 day') IS NOT TRUE THEN
		PERFORM idempotency_internal.check_lease(coalesce(lease, '0'));
	END IF;
	s := idempotency_internal.subscription_of(subscription);
	PERFORM idempotency_internal.check_transaction('fetch');

	-- Choose a partition of the oldest generation that has something and no batch in flight (is_due()); of
	-- several, the one that changed least recently.  It is locked until the end of the transaction; one that
	-- has nothing is not locked.
	LOOP
		-- the clock was set back: the deadline is too far away now
		EXIT WHEN clock_timestamp() < now;
		-- extension only
		IF wait > interval '0' THEN
			PERFORM idempotency_internal.listen(s.topics);
		END IF;
		-- both editions
		now := clock_timestamp();
		lease_end := now + lease;
		-- extension only
		IF idempotency_internal.is_worker_fetch() THEN
			lease_end := 'infinity';
		END IF;
		-- both editions
		oldest := NULL;
		is_ending := false;
		changed := false;
		FOR next IN
			SELECT a.generation, a.modulus, a.remainder, a.stop IS NOT NULL AS is_ending, n.position,
				EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = a.subscription AND k.retry_at IS NOT NULL) AS has_parked
			FROM idempotency.partition AS a
			CROSS JOIN LATERAL (SELECT o AS position, o.changed_at FROM idempotency.position AS o
				WHERE o.subscription = a.subscription AND o.partition = a.partition
				ORDER BY o.version DESC LIMIT 1) AS n
			WHERE a.subscription = s.subscription AND s.paused_at IS NULL
			ORDER BY a.generation, n.changed_at
		LOOP
			EXIT WHEN next.generation > oldest;
			oldest := next.generation;
			is_ending := next.is_ending;
			p := next.position;
			CONTINUE WHEN NOT idempotency_internal.is_due(p, is_ending, next.modulus, next.remainder, s.patterns);
			-- before the lock, which gives the transaction its id
			IF p.upto IS NULL AND born IS NULL THEN
				drawn := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
				born := idempotency_internal.next_id();
			END IF;
			SELECT * INTO part FROM idempotency.partition AS a
			WHERE a.subscription = p.subscription AND a.partition = p.partition
			FOR UPDATE SKIP LOCKED;
			CONTINUE WHEN NOT FOUND;
			-- The low ten bits are the partition.  Not random(), which setseed() makes repeat.
			number := (('x' || translate(left(gen_random_uuid()::text, 13), '-', ''))::bit(48)::bigint & 4398046511103) + 1 << 10 | p.partition;

			-- In one statement, a full batch without gaps from the middle of a window, if nothing is parked, and
			-- subscription and position are still those that were read before the lock.
			IF p.upto IS NOT NULL AND p.former_base IS NULL AND p.events = '{}' AND NOT next.has_parked THEN
				start := greatest(p.reached, p.skip);
				RETURN QUERY
					WITH batch AS MATERIALIZED (
						SELECT array_agg(e.seq) AS events, min(e.seq) AS first, max(e.seq) AS last
						FROM (SELECT o.seq, o.bytes, o.deliver_at
							FROM idempotency.outbox AS o
							WHERE o.seq > start AND o.seq <= least(p.top - 1, start + 20000)
								AND pg_visible_in_snapshot(o.txid, p.upto) AND NOT pg_visible_in_snapshot(o.txid, p.base)
								AND (part.modulus = 1 OR o.bucket % part.modulus = part.remainder) AND o.aggregatetype LIKE ANY (s.patterns)
							ORDER BY o.seq
							LIMIT max_events) AS e
						HAVING count(*) = max_events AND max(e.seq) - min(e.seq) = max_events - 1 AND count(e.deliver_at) = 0
							AND sum(e.bytes) <= max_bytes
							AND EXISTS (SELECT FROM idempotency.subscription AS c
								WHERE c.subscription = s.subscription AND c.paused_at IS NULL AND c.patterns = s.patterns)
							AND NOT EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = s.subscription AND k.retry_at IS NOT NULL)),
					written AS MATERIALIZED (
						UPDATE idempotency.position AS n SET
							version = n.version + 1, changed_at = now, reached = b.last, events = b.events, size = max_events, retried = false, failures = 0,
							alone = false, batch = number, leased_at = now, leased_until = lease_end, holder = pg_backend_pid()
						FROM batch AS b
						WHERE n.subscription = p.subscription AND n.partition = p.partition AND n.version = p.version AND n.changed_at = p.changed_at
						RETURNING b.first, b.last)
					SELECT number, o.seq, o.id, o.aggregatetype::text, o.aggregateid::text, o.type::text, o.payload, o.headers, 1, o.published_at
					FROM idempotency.outbox AS o
					WHERE o.seq >= (SELECT w.first FROM written AS w) AND o.seq <= (SELECT w.last FROM written AS w)
					ORDER BY o.seq;
				IF FOUND THEN
					-- extension only
					PERFORM idempotency_internal.count_events('delivered', max_events);
					-- both editions
					RETURN;
				END IF;
			END IF;

			-- as they are under the lock
			SELECT * INTO s FROM idempotency.subscription AS e
			WHERE e.subscription = part.subscription AND e.paused_at IS NULL AND (p.version, p.changed_at) = (
				SELECT o.version, o.changed_at FROM idempotency.position AS o
				WHERE o.subscription = part.subscription AND o.partition = part.partition
				ORDER BY o.version DESC LIMIT 1);
			changed := NOT FOUND;
			EXIT WHEN changed;
			p := idempotency_internal.next_batch(s, part, p, number, max_events, max_bytes, now, lease_end, drawn, born);
			IF p.batch IS NULL THEN
				moved := true;
				CONTINUE;
			END IF;
			-- extension only
			PERFORM idempotency_internal.count_events('delivered', p.size);
			-- both editions
			numbers := p.events[1 : p.size];
			IF p.retried THEN
				RETURN QUERY
					SELECT number, l.seq, coalesce(k.id, o.id), coalesce(k.aggregatetype, o.aggregatetype)::text, coalesce(k.aggregateid, o.aggregateid)::text,
						coalesce(k.type, o.type)::text, CASE WHEN k.id IS NULL THEN o.payload ELSE k.payload END, CASE WHEN k.id IS NULL THEN o.headers ELSE k.headers END,
						coalesce(k.attempts, 0) + p.failures + 1, coalesce(k.published_at, o.published_at)
					FROM unnest(numbers) WITH ORDINALITY AS l (seq, n)
					LEFT JOIN idempotency.parked AS k ON k.subscription = p.subscription AND k.seq = l.seq
					LEFT JOIN idempotency.outbox AS o ON o.seq = l.seq
					WHERE k.id IS NOT NULL OR o.id IS NOT NULL
					ORDER BY l.n;
			ELSIF numbers[p.size] - numbers[1] = p.size - 1 THEN
				-- without gaps, reading the range is faster
				RETURN QUERY
					SELECT number, o.seq, o.id, o.aggregatetype::text, o.aggregateid::text, o.type::text, o.payload, o.headers, p.failures + 1, o.published_at
					FROM idempotency.outbox AS o
					WHERE o.seq >= numbers[1] AND o.seq <= numbers[p.size]
					ORDER BY o.seq;
			ELSE
				RETURN QUERY
					SELECT number, o.seq, o.id, o.aggregatetype::text, o.aggregateid::text, o.type::text, o.payload, o.headers, p.failures + 1, o.published_at
					FROM idempotency.outbox AS o
					WHERE o.seq = ANY (numbers)
					ORDER BY o.seq;
			END IF;
			RETURN;
		END LOOP;
		IF changed THEN
			moved := true;
			s := idempotency_internal.subscription_of(subscription);
			CONTINUE;
		ELSIF is_ending AND idempotency_internal.end_generation(s.subscription, oldest) THEN
			moved := true;
			CONTINUE;
		END IF;
		-- the commit must keep the progress, and unlock
		EXIT WHEN moved OR (clock_timestamp() < deadline) IS NOT TRUE;
		-- portable only
		PERFORM pg_sleep(least(pause, extract(epoch FROM deadline - clock_timestamp())::double precision));
		-- extension only
		PERFORM idempotency_internal.wait_for_event(least(deadline, idempotency_internal.next_retry(subscription)), pause);
		-- both editions
		pause := least(pause * 2, 1);
		s := idempotency_internal.subscription_of(subscription);
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency.fetch(text, integer, interval, interval, bigint) IS
	'get the next batch of events';

-- Without events, fetch() can have read a part of the log only.  Partitions that another transaction has
-- locked do not count: a loop would not wait for it.
CREATE FUNCTION idempotency.has_more(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.subscription_of(subscription);
BEGIN
	PERFORM idempotency_internal.check_transaction('has_more');
	PERFORM FROM idempotency.partition AS a
	WHERE a.subscription = s.subscription AND a.partition IN (SELECT idempotency_internal.due_partitions(s))
	LIMIT 1
	FOR UPDATE SKIP LOCKED;
	RETURN FOUND;
END
$$;
COMMENT ON FUNCTION idempotency.has_more(text) IS
	'after a fetch() without events: whether another one can return some';

-- The position of the batch, under the lock of its partition, for a caller that may use the
-- subscription.  Raises IK408 if the batch is not current, and 55P03 if another transaction uses the
-- partition for longer than idempotency.wait.
CREATE FUNCTION idempotency_internal.batch_of(function text, s idempotency.subscription, number bigint)
	RETURNS idempotency.position
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	deadline timestamptz;
	p idempotency.position;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only(function);
	ELSIF number IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'batch is missing', NULL, 'Pass the number that idempotency.fetch() returned.');
	END IF;
	LOOP
		PERFORM FROM idempotency.partition AS a
		WHERE a.subscription = s.subscription AND a.partition = (number & 1023)
		FOR UPDATE SKIP LOCKED;
		EXIT WHEN FOUND OR NOT EXISTS (SELECT FROM idempotency.partition AS a WHERE a.subscription = s.subscription AND a.partition = (number & 1023));
		deadline := coalesce(deadline, clock_timestamp() + idempotency_internal.default_wait());
		IF clock_timestamp() >= deadline THEN
			PERFORM idempotency_internal.raise_in_use(s.subscription);
		END IF;
		PERFORM pg_sleep(0.01);
	END LOOP;
	SELECT * INTO p FROM idempotency.position AS o
	WHERE o.subscription = s.subscription AND o.partition = (number & 1023)
	ORDER BY o.version DESC LIMIT 1;
	IF p.batch IS DISTINCT FROM number THEN
		PERFORM idempotency_internal.raise('IK408', 'this batch is not the current one of its subscription',
			format('Subscription "%s", batch %s.', s.subscription, number),
			'Call idempotency.fetch() for the next batch; to keep one longer, pass a longer lease or call idempotency.extend().');
	END IF;
	RETURN p;
END
$$;
COMMENT ON FUNCTION idempotency_internal.batch_of(text, idempotency.subscription, bigint) IS 'the position of a current batch, locked';

-- Acknowledges events of a batch; NULL: all.
CREATE FUNCTION idempotency_internal.ack_events(subscription text, batch bigint, events bigint[])
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	p idempotency.position;
	done bigint[];
	queue text;
BEGIN
	p := idempotency_internal.batch_of('ack', idempotency_internal.subscription_of(subscription), batch);
	done := p.events[1 : p.size];
	IF ack_events.events IS NOT NULL THEN
		done := ARRAY(SELECT d FROM unnest(done) AS d WHERE d = ANY (ack_events.events));
	END IF;
	IF p.retried THEN
		FOR queue IN
			WITH gone AS (DELETE FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = ANY (done) RETURNING k.queue)
			SELECT DISTINCT g.queue FROM gone AS g WHERE g.queue IS NOT NULL
		LOOP
			PERFORM idempotency_internal.schedule_queue(p.subscription, queue, NULL, NULL);
		END LOOP;
	END IF;
	IF p.failing_since < clock_timestamp() - interval '1 minute' AND done <> '{}' AND NOT idempotency_internal.has_failed(p, 0) THEN
		RAISE LOG 'events of idempotency subscription "%" no longer fail in partition %; they did since %', p.subscription, p.partition, p.failing_since;
		p.failing_since := NULL;
	END IF;
	p.acknowledged := p.acknowledged + cardinality(done);
	-- extension only
	PERFORM idempotency_internal.count_events('acknowledged', cardinality(done));
	-- both editions
	IF ack_events.events IS NOT NULL THEN
		p.events := ARRAY(SELECT e.seq FROM unnest(p.events) WITH ORDINALITY AS e (seq, n) WHERE e.seq <> ALL (done) ORDER BY e.n);
		p.size := p.size - cardinality(done);
	ELSE
		p.events := p.events[p.size + 1 :];
		p.batch := NULL;
	END IF;
	PERFORM idempotency_internal.put_position(p);
	RETURN cardinality(done);
END
$$;
COMMENT ON FUNCTION idempotency_internal.ack_events(text, bigint, bigint[]) IS 'acknowledge events of a batch';

CREATE FUNCTION idempotency.ack(subscription text, batch bigint)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	state record;
BEGIN
	-- In two statements, a batch that is all of the list and has no parked events, if nothing failed before
	IF current_setting('transaction_read_only') = 'off' THEN
		SELECT s.owner, n.version, n.size INTO state
		FROM idempotency.subscription AS s
		JOIN idempotency.partition AS a ON a.subscription = s.subscription AND a.partition = (ack.batch & 1023)
		CROSS JOIN LATERAL (SELECT o.version, o.size, o.batch, o.alone, o.retried, o.failing_since FROM idempotency.position AS o
			WHERE o.subscription = a.subscription AND o.partition = a.partition ORDER BY o.version DESC LIMIT 1) AS n
		WHERE s.subscription = ack.subscription COLLATE "C" AND n.batch = ack.batch AND NOT n.alone AND NOT n.retried AND n.failing_since IS NULL
		FOR UPDATE OF a SKIP LOCKED;
		IF state.owner = idempotency_internal.caller() THEN
			UPDATE idempotency.position AS n SET
				version = n.version + 1, changed_at = clock_timestamp(), events = '{}', size = 0, batch = NULL, leased_at = NULL,
				leased_until = NULL, holder = NULL, acknowledged = n.acknowledged + n.size
			WHERE n.subscription = ack.subscription COLLATE "C" AND n.partition = (ack.batch & 1023)
				AND n.version = state.version AND n.batch = ack.batch;
			IF FOUND THEN
				-- extension only
				PERFORM idempotency_internal.count_events('acknowledged', state.size);
				-- both editions
				RETURN state.size;
			END IF;
		END IF;
	END IF;
	RETURN idempotency_internal.ack_events(subscription, batch, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.ack(text, bigint) IS
	'acknowledge what the batch still has; returns the number of events';

-- A form of its own: a list without elements is NULL for array_agg(), and not all events.
CREATE FUNCTION idempotency.ack(subscription text, batch bigint, events bigint[])
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
BEGIN
	IF events IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'events are missing', NULL, 'Pass their numbers, or leave them out to acknowledge all of the batch.');
	END IF;
	RETURN idempotency_internal.ack_events(subscription, batch, events);
END
$$;
COMMENT ON FUNCTION idempotency.ack(text, bigint, bigint[]) IS
	'acknowledge some events of the batch; returns their number';

CREATE FUNCTION idempotency.nack(
	subscription text, batch bigint, event_id uuid, error text DEFAULT NULL, retry_in interval DEFAULT NULL, dead boolean DEFAULT false)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.subscription_of(subscription);
	p idempotency.position := idempotency_internal.batch_of('nack', s, batch);
	numbers bigint[];
	twins bigint[];
	event bigint;
	retry_at timestamptz;
	failed record;
BEGIN
	IF retry_in < interval '0' THEN
		PERFORM idempotency_internal.raise('22023', 'retry_in must not be negative', NULL,
			'Pass 0 for a retry at once, or NULL for the subscription''s delay.');
	ELSIF event_id IS NULL THEN
		-- the list stays, for the next fetch()
		p.batch := NULL;
		PERFORM idempotency_internal.put_position(p);
		RETURN clock_timestamp();
	END IF;
	numbers := p.events[1 : p.size];
	twins := ARRAY(SELECT o.seq FROM idempotency.outbox AS o WHERE o.seq = ANY (numbers) AND o.id = event_id)
		|| ARRAY(SELECT k.seq FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = ANY (numbers) AND k.id = event_id);
	IF twins = '{}' THEN
		-- It has left the batch, by an earlier call or behind one that failed: nothing changes
		SELECT CASE WHEN k.dead_at IS NULL THEN coalesce(k.retry_at, (SELECT h.retry_at FROM idempotency.parked AS h
			WHERE h.subscription = k.subscription AND h.queue = k.queue AND h.retry_at IS NOT NULL)) END
		INTO retry_at
		FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.partition = p.partition AND k.id = event_id;
		IF FOUND THEN
			RETURN retry_at;
		END IF;
		PERFORM idempotency_internal.raise('22023', format('event %s is not in the batch', event_id),
			format('Subscription "%s", batch %s.', subscription, batch), 'Pass the id of an event that has not left the batch.');
	END IF;
	-- Of events with the same id, any can be the one that failed: none may be acknowledged with the rest
	twins := ARRAY(SELECT l.seq FROM unnest(numbers) WITH ORDINALITY AS l (seq, n) WHERE l.seq = ANY (twins) ORDER BY l.n);
	FOREACH event IN ARRAY twins LOOP
		-- not behind one of its aggregate that has left
		CONTINUE WHEN event <> ALL (p.events[1 : p.size]);
		failed := idempotency_internal.fail_event(s, p, event, error, retry_in, coalesce(dead, false) AND event = twins[1], false);
		p := failed.p;
		IF event = twins[1] THEN
			retry_at := failed.retry_at;
			-- the others are never buried by this
			s.max_attempts := 2147483647;
		END IF;
	END LOOP;
	PERFORM idempotency_internal.put_position(p);
	RETURN retry_at;
END
$$;
COMMENT ON FUNCTION idempotency.nack(text, bigint, uuid, text, interval, boolean) IS
	'report that an event of the batch failed; returns when it is retried, NULL if never';

CREATE FUNCTION idempotency.extend(subscription text, batch bigint, lease interval)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	p idempotency.position;
BEGIN
	PERFORM idempotency_internal.check_lease(coalesce(lease, '0'));
	p := idempotency_internal.batch_of('extend', idempotency_internal.subscription_of(subscription), batch);
	p.leased_at := clock_timestamp();
	p.leased_until := p.leased_at + lease;
	PERFORM idempotency_internal.put_position(p);
	RETURN p.leased_until;
END
$$;
COMMENT ON FUNCTION idempotency.extend(text, bigint, interval) IS
	'extend the lease of a batch; returns when it ends';

