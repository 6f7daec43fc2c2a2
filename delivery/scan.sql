-- ---------------------------------------------------------------------------
-- The scan: what a partition reads next
-- ---------------------------------------------------------------------------

-- A position says what was read by a snapshot, "base": every event that is visible in it.
-- To read more, it takes a newer snapshot, "upto", and reads what is visible in "upto" and not
-- in "base", in the order of the numbers.  Then "base" becomes "upto".  The order of the steps
-- makes this possible with an index on the numbers alone:
--
--	1. mark: the last number drawn        2. born: a new transaction id
--	3. the snapshot                       4. top: the last number drawn
--
-- A transaction with an id from "born" on draws its numbers above "mark".  What is visible in the
-- snapshot was drawn up to "top".  So, in the next window, events that are not visible in "base"
-- have numbers above its "mark", except those of transactions that were in progress in "base"
-- ("xids", each with a number below its first one, in "froms"), and of those with ids between the
-- end of "base" and "born": xmax of a snapshot is the last completed id plus 1, so transactions
-- with greater ids can be running ("range_from").  A window is read from the lowest of these numbers
-- of transactions that have ended, or from "mark", to "top"; "reached" is how far.
--
-- A window is read in steps: events that were read are listed in the position until they are
-- acknowledged, so that the position itself only moves on.
--
-- After a restore, the transaction ids of rows and positions are those of another cluster.  A
-- window that was begun there is finished by what is stored.  Then begin_window() locks out
-- publishers once: all rows are committed, those that "former_base" does not show are read as a
-- window, and numbers drawn from then on belong to transactions of this cluster.

-- An id that is greater than those of all transactions that have drawn a number so far.  If
-- the transaction has an id already, that of a subtransaction serves: its row has it.
CREATE FUNCTION idempotency_internal.next_id()
	RETURNS xid8
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	me bigint := pg_current_xact_id_if_assigned()::text::bigint;
	writer bigint;
BEGIN
	IF me IS NULL THEN
		RETURN pg_current_xact_id();
	END IF;
	BEGIN
		INSERT INTO idempotency_internal.probe DEFAULT VALUES RETURNING xmin::text::bigint INTO writer;
		RAISE SQLSTATE 'IK000';
	EXCEPTION
		WHEN SQLSTATE 'IK000' THEN
			RETURN (me + (writer - me & 4294967295))::text::xid8;
	END;
END
$$;
COMMENT ON FUNCTION idempotency_internal.next_id() IS 'a new transaction id';

-- The server's snapshot leaves out the id of its own transaction, which can still roll back.
CREATE FUNCTION idempotency_internal.snapshot()
	RETURNS pg_snapshot
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	now pg_snapshot := pg_current_snapshot();
	me xid8 := pg_current_xact_id_if_assigned();
BEGIN
	IF me IS NULL OR NOT pg_visible_in_snapshot(me, now) THEN
		RETURN now;
	END IF;
	RETURN concat_ws(':', least(pg_snapshot_xmin(now), me), pg_snapshot_xmax(now),
		(SELECT string_agg(x::text, ',' ORDER BY x) FROM (SELECT pg_snapshot_xip(now) UNION SELECT me) AS x (x)));
END
$$;
COMMENT ON FUNCTION idempotency_internal.snapshot() IS 'the current snapshot, in which this transaction is in progress';

-- Whether a transaction can have drawn numbers for events before this call: publish() keeps the lock of its INSERT.
-- It cannot if it is in progress and does not have that lock, in one look at all locks.
CREATE FUNCTION idempotency_internal.has_published(xid xid8 DEFAULT pg_current_xact_id_if_assigned())
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT $1 IS NOT NULL AND NOT EXISTS (
		SELECT FROM pg_locks AS l
		GROUP BY l.virtualtransaction
		HAVING bool_or(l.locktype = 'transactionid' AND l.transactionid = $1::xid AND l.mode = 'ExclusiveLock')
			AND NOT bool_or(l.locktype = 'relation' AND l.relation = 'idempotency.outbox'::regclass AND l.mode = 'RowExclusiveLock'
				AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())))
$$;
COMMENT ON FUNCTION idempotency_internal.has_published(xid8) IS 'whether a transaction can have published events';

-- Whether the ids of a position are those of another cluster, or of another table: after a restore.
-- Without a subquery, so that the planner inlines it.
CREATE FUNCTION idempotency_internal.is_foreign(p idempotency.position)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT p.relation <> 'idempotency.outbox'::regclass OR p.system_identifier <> (pg_control_system()).system_identifier
$$;
COMMENT ON FUNCTION idempotency_internal.is_foreign(idempotency.position) IS 'whether a position was restored and not used here yet';

-- The columns xids, froms and range_from for a snapshot, by a position that has read less.
CREATE FUNCTION idempotency_internal.open_transactions(
	p idempotency.position, snapshot pg_snapshot, OUT xids xid8[], OUT froms bigint[], OUT range_from bigint)
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
DECLARE
	last bigint;
BEGIN
	IF pg_snapshot_xmin(snapshot) = pg_snapshot_xmax(snapshot) THEN
		xids := '{}';
		froms := '{}';
	ELSE
		last := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
		SELECT coalesce(array_agg(x), '{}'), coalesce(array_agg(CASE
			WHEN u.start IS NOT NULL THEN u.start
			WHEN x >= p.born THEN p.mark
			WHEN x >= pg_snapshot_xmax(p.base) THEN p.range_from
			-- one that no position has seen: the first subscription finds it, or it is this transaction
			WHEN NOT idempotency_internal.has_published(x) THEN last
			ELSE 0
		END), '{}')
		INTO xids, froms
		FROM pg_snapshot_xip(snapshot) AS x
		LEFT JOIN unnest(p.xids, p.froms) AS u (xid, start) ON u.xid = x;
	END IF;
	range_from := CASE WHEN pg_snapshot_xmax(snapshot) < p.born THEN p.range_from ELSE p.mark END;
END
$$;
COMMENT ON FUNCTION idempotency_internal.open_transactions(idempotency.position, pg_snapshot) IS
	'what was in progress in a snapshot, and numbers below the first ones';

CREATE FUNCTION idempotency_internal.raise_sequence()
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('55000', 'sequence "idempotency.outbox_seq" is behind the numbers of events',
		'The outbox was replicated or restored without its sequence.',
		'Call setval(''idempotency.outbox_seq'', (SELECT max(n) FROM (SELECT seq FROM idempotency.outbox UNION ALL '
		'SELECT seq FROM idempotency.parked UNION ALL SELECT greatest(top, mark, skip) FROM idempotency.position) AS numbers (n))).')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_sequence() IS '55000: the sequence was not restored';

-- Begins a window: sets the columns from upto to reached, and top.  "drawn" and "born" are steps 1 and 2,
-- or NULL.
CREATE FUNCTION idempotency_internal.begin_window(INOUT p idempotency.position, part idempotency.partition, drawn bigint, born xid8)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lowest bigint;
BEGIN
	IF part.stop IS NOT NULL THEN
		p.upto := part.stop;
		p.upto_born := part.stop_born;
		p.upto_mark := part.stop_mark;
		p.top := part.stop_top;
	ELSE
		IF idempotency_internal.is_foreign(p) THEN
			p := idempotency_internal.begin_here(p);
			RETURN;
		END IF;
		p.upto_mark := coalesce(drawn, pg_sequence_last_value('idempotency.outbox_seq'), 0);
		p.upto_born := coalesce(born, idempotency_internal.next_id());
		p.upto := idempotency_internal.snapshot();
		p.top := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
		IF p.top < p.mark THEN
			PERFORM idempotency_internal.raise_sequence();
		END IF;
	END IF;
	IF p.xids <> '{}' THEN
		SELECT min(u.start) INTO lowest FROM unnest(p.xids, p.froms) AS u (xid, start) WHERE pg_visible_in_snapshot(u.xid, p.upto);
	END IF;
	IF p.born > pg_snapshot_xmax(p.base) THEN
		lowest := least(lowest, p.range_from);
	END IF;
	p.reached := least(lowest, p.mark);
	-- past numbers before the first event
	IF p.top - p.reached > 20000 THEN
		p.reached := least(p.top, greatest(p.reached, coalesce((SELECT min(o.seq) - 1 FROM idempotency.outbox AS o), p.top)));
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.begin_window(idempotency.position, idempotency.partition, bigint, xid8) IS
	'begin to read the events between the position and now';

-- The same for the position of another cluster.  A transaction that has published, here, would
-- read its own events as those of the dump.
CREATE FUNCTION idempotency_internal.begin_here(INOUT p idempotency.position)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	last bigint;
BEGIN
	IF idempotency_internal.has_published() THEN
		PERFORM idempotency_internal.raise('55000', 'cannot fetch in a transaction that has published, after a restore', NULL,
			'Commit, and call idempotency.fetch() in a transaction of its own.');
	END IF;
	PERFORM idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait()));
	LOCK TABLE idempotency.outbox IN SHARE ROW EXCLUSIVE MODE;
	PERFORM set_config('lock_timeout', lock_timeout, true);
	last := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	IF last < greatest(p.top, p.mark, p.skip) OR EXISTS (SELECT FROM idempotency.outbox AS o WHERE o.seq > last)
		OR EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq > last) THEN
		PERFORM idempotency_internal.raise_sequence();
	END IF;
	p.reached := least(p.mark, p.range_from, (SELECT min(f) FROM unnest(p.froms) AS f));
	p.former_base := p.base;
	p.former_top := p.top;
	p.born := idempotency_internal.next_id();
	p.base := idempotency_internal.snapshot();
	p.mark := last;
	p.top := last;
	p.range_from := last;
	p.xids := ARRAY(SELECT pg_snapshot_xip(p.base));
	p.froms := array_fill(last, ARRAY[cardinality(p.xids)]);
	p.upto := p.base;
	p.upto_born := p.born;
	p.upto_mark := last;
	p.system_identifier := (SELECT c.system_identifier FROM pg_control_system() AS c);
	p.relation := 'idempotency.outbox'::regclass::oid;
END
$$;
COMMENT ON FUNCTION idempotency_internal.begin_here(idempotency.position) IS
	'begin to read the events of a dump that the position had not read';

-- Ends a window, all of which was read.
CREATE FUNCTION idempotency_internal.end_window(INOUT p idempotency.position, part idempotency.partition)
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
DECLARE
	started record := idempotency_internal.open_transactions(p, p.upto);
BEGIN
	p.ended := coalesce(p.upto_born = part.stop_born AND p.upto_mark = part.stop_mark, false);
	p.xids := started.xids;
	p.froms := started.froms;
	p.range_from := started.range_from;
	p.base := p.upto;
	p.born := p.upto_born;
	p.mark := p.upto_mark;
	p.upto := NULL;
	p.upto_born := NULL;
	p.upto_mark := NULL;
	p.former_base := NULL;
	p.former_top := NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.end_window(idempotency.position, idempotency.partition) IS 'end a window';

-- Tells whether a partition has something for fetch(): no batch with events is out, and there are events to deliver, or
-- the log is to be read on.  It takes no lock and writes nothing, so that waiting consumers do neither.
-- Events of other subscriptions alone are passed by a new window if there are a thousand of them, so that the next call
-- does not read them again, or if one is a minute old, so that it can be deleted.
CREATE FUNCTION idempotency_internal.is_due(
	p idempotency.position, is_ending boolean, modulus integer, remainder integer, patterns text[])
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	last bigint;
	now pg_snapshot;
	start bigint;
BEGIN
	-- extension only
	-- the batch of a worker has no lease: it is out as long as the worker has it
	IF p.size > 0 AND (CASE p.leased_until WHEN 'infinity' THEN idempotency_internal.is_worker_batch(p.batch)
		ELSE clock_timestamp() BETWEEN p.leased_at AND p.leased_until END) THEN
	-- portable only
	IF p.size > 0 AND clock_timestamp() BETWEEN p.leased_at AND p.leased_until THEN
	-- both editions
		RETURN false;
	ELSIF p.upto IS NOT NULL OR p.events <> '{}' OR EXISTS (SELECT FROM idempotency.parked AS k
		WHERE k.subscription = p.subscription AND k.partition = p.partition AND k.retry_at <= clock_timestamp()) THEN
		RETURN true;
	END IF;
	last := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	now := pg_current_snapshot();
	start := CASE WHEN p.born > pg_snapshot_xmax(p.base) THEN p.range_from ELSE p.mark END;
	IF p.xids <> '{}' THEN
		start := least(start, (SELECT min(u.start) FROM unnest(p.xids, p.froms) AS u (xid, start) WHERE pg_visible_in_snapshot(u.xid, now)));
	END IF;
	-- ids of another cluster tell nothing
	IF NOT p.ended AND idempotency_internal.is_foreign(p) THEN
		RETURN true;
	ELSIF p.ended OR last = start AND NOT is_ending THEN
		RETURN false;
	END IF;
	RETURN is_ending OR last < p.mark OR last - start > 1000 OR EXISTS (SELECT FROM idempotency.outbox AS o
		WHERE o.seq > greatest(start, p.skip) AND NOT pg_visible_in_snapshot(o.txid, p.base)
			AND o.txid IS DISTINCT FROM pg_current_xact_id_if_assigned()
			AND (o.bucket % modulus = remainder AND o.aggregatetype LIKE ANY (patterns) OR o.published_at < clock_timestamp() - interval '1 minute'));
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_due(idempotency.position, boolean, integer, integer, text[]) IS
	'whether a partition has something for fetch()';

-- Copies events of the log that are in the list into the table of parked events, and returns
-- the others.  An event that an earlier one of its aggregate blocks waits; one that is not due
-- yet is scheduled.
CREATE FUNCTION idempotency_internal.park_blocked(p idempotency.position, seqs bigint[])
	RETURNS bigint[]
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	now timestamptz := clock_timestamp();
	blocked text[] := ARRAY(SELECT DISTINCT o.aggregateid FROM idempotency.outbox AS o
		WHERE o.seq = ANY (seqs) AND o.deliver_at IS NULL AND EXISTS (SELECT FROM idempotency.parked AS k
			WHERE k.subscription = p.subscription AND k.queue = o.aggregateid AND k.dead_at IS NULL));
	leaving bigint[];
BEGIN
	WITH moved AS (
		INSERT INTO idempotency.parked (subscription, partition, seq, published_at, id, bucket, bytes, queue, aggregatetype, aggregateid,
			type, payload, headers, attempts, alone, retry_at)
		SELECT p.subscription, p.partition, o.seq, o.published_at, o.id, o.bucket, o.bytes, CASE WHEN o.deliver_at IS NULL THEN o.aggregateid END,
			o.aggregatetype, o.aggregateid, o.type, o.payload, o.headers, 0, false, o.deliver_at
		FROM idempotency.outbox AS o
		WHERE o.seq = ANY (seqs) AND (o.deliver_at > now OR o.deliver_at IS NULL AND o.aggregateid = ANY (blocked))
		ON CONFLICT (subscription, seq) DO NOTHING
		RETURNING seq)
	SELECT array_agg(m.seq) INTO leaving FROM moved AS m;
	RETURN ARRAY(SELECT s.seq FROM unnest(seqs) WITH ORDINALITY AS s (seq, n)
		WHERE (s.seq = ANY (leaving)) IS NOT TRUE ORDER BY s.n);
END
$$;
COMMENT ON FUNCTION idempotency_internal.park_blocked(idempotency.position, bigint[]) IS
	'park those events of the log that cannot be delivered yet, and return the others';

-- Adds events of the log to the list of a position, until it has max_events or max_bytes, or
-- nothing is left.  It ends a window and begins another one at most, and reads 100,000 numbers at most.
--
-- The planner expects one row from conditions on snapshots, and would sort the whole window for
-- each batch: fetch() turns all other plans off than the index in its order.
CREATE FUNCTION idempotency_internal.read_log(
	INOUT p idempotency.position, part idempotency.partition, patterns text[], max_events integer, max_bytes bigint,
	drawn bigint, born xid8, has_parked boolean)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	everything boolean := patterns = '{%}';
	queues text[];
	missing integer;
	start bigint;
	upto bigint;
	seqs bigint[];
	sizes integer[];
	total bigint;
	begun boolean := false;
	held boolean;
	is_cut boolean;
BEGIN
	-- aggregates whose events wait; of more than 100, any
	IF has_parked THEN
		queues := ARRAY(SELECT k.queue FROM idempotency.parked AS k
			WHERE k.subscription = p.subscription AND k.retry_at IS NOT NULL AND k.queue IS NOT NULL LIMIT 101);
	END IF;
	FOR step IN 1 .. 5 LOOP
		IF p.upto IS NULL THEN
			EXIT WHEN p.ended OR begun;
			p := idempotency_internal.begin_window(p, part, drawn, born);
			begun := true;
		END IF;
		missing := max_events - cardinality(p.events);
		EXIT WHEN missing <= 0 OR max_bytes <= 0;
		start := greatest(p.reached, p.skip);
		upto := least(p.top, start + 20000);
		SELECT array_agg(e.seq), sum(e.bytes), bool_or(e.held)
		INTO seqs, total, held
		FROM (SELECT o.seq, o.bytes, o.deliver_at IS NOT NULL OR o.aggregateid = ANY (queues) AS held
			FROM idempotency.outbox AS o
			WHERE o.seq > start AND o.seq <= upto
				AND CASE WHEN p.former_base IS NULL
					THEN pg_visible_in_snapshot(o.txid, p.upto) AND NOT pg_visible_in_snapshot(o.txid, p.base)
					ELSE (o.seq <= p.former_top AND pg_visible_in_snapshot(o.txid, p.former_base)) IS NOT TRUE
				END
				AND (part.modulus = 1 OR o.bucket % part.modulus = part.remainder)
				AND (everything OR o.aggregatetype LIKE ANY (patterns))
				AND (NOT p.retried OR o.seq <> ALL (p.events)) -- a copy that seek() did not see, because its topic was left out
			ORDER BY o.seq
			LIMIT missing) AS e;

		-- Cut the list where it has enough bytes, but not before its first event
		is_cut := cardinality(seqs) = missing;
		IF total > max_bytes THEN
			sizes := ARRAY(SELECT o.bytes FROM idempotency.outbox AS o WHERE o.seq = ANY (seqs) ORDER BY o.seq);
			total := sizes[1];
			FOR i IN 2 .. cardinality(seqs) + 1 LOOP
				IF i > cardinality(seqs) OR total + sizes[i] > max_bytes THEN
					is_cut := is_cut OR i <= cardinality(seqs);
					seqs := seqs[1 : i - 1];
					EXIT;
				END IF;
				total := total + sizes[i];
			END LOOP;
			-- the events before it are enough
			IF p.events <> '{}' AND total > max_bytes THEN
				EXIT;
			END IF;
		END IF;
		max_bytes := max_bytes - coalesce(total, 0);
		-- a long range can have no rows: a copy that takes over is ahead of its source
		p.reached := CASE
			WHEN is_cut THEN seqs[cardinality(seqs)]
			WHEN seqs IS NULL AND p.top - upto > 1000000
			THEN least(p.top, (SELECT min(o.seq) - 1 FROM idempotency.outbox AS o WHERE o.seq > upto))
			ELSE upto
		END;

		IF held OR cardinality(queues) > 100 THEN
			seqs := idempotency_internal.park_blocked(p, seqs);
		END IF;
		-- The log alone is listed by number, as fetch() returns it: nack() takes out what is behind
		IF seqs[1] < p.events[cardinality(p.events)] AND NOT p.retried THEN
			p.events := ARRAY(SELECT e FROM unnest(p.events || seqs) AS e ORDER BY e);
		ELSIF seqs IS NOT NULL THEN
			p.events := p.events || seqs;
		END IF;
		IF p.reached >= p.top THEN
			p := idempotency_internal.end_window(p, part);
		END IF;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.read_log(idempotency.position, idempotency.partition, text[], integer, bigint, bigint, xid8, boolean) IS
	'add events of the log to the list of a position';

