-- ---------------------------------------------------------------------------
-- Operating subscriptions
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.pause(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency_internal.locked_subscription('pause', subscription);
	UPDATE idempotency.subscription AS s SET paused_at = clock_timestamp()
	WHERE s.subscription = pause.subscription COLLATE "C" AND s.paused_at IS NULL;
	IF FOUND THEN
		PERFORM idempotency_internal.log_call('pause', format('subscription "%s"', subscription));
		RETURN true;
	END IF;
	RETURN false;
END
$$;
COMMENT ON FUNCTION idempotency.pause(text) IS 'deliver nothing until resume(); batches that are out can be acknowledged; false if it was paused';

CREATE FUNCTION idempotency.resume(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency_internal.locked_subscription('resume', subscription);
	UPDATE idempotency.subscription AS s SET paused_at = NULL
	WHERE s.subscription = resume.subscription COLLATE "C" AND s.paused_at IS NOT NULL;
	IF FOUND THEN
		PERFORM idempotency_internal.log_call('resume', format('subscription "%s"', subscription));
		RETURN true;
	END IF;
	RETURN false;
END
$$;
COMMENT ON FUNCTION idempotency.resume(text) IS 'deliver again after pause(); false if it was not paused';

-- The number of the last event before the first one published at that time or later.  The numbers after it, and those
-- of an empty outbox, can be of transactions in progress.
CREATE FUNCTION idempotency_internal.number_before(since timestamptz)
	RETURNS bigint
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT coalesce(max(o.seq), 0) FROM idempotency.outbox AS o
	WHERE o.seq < coalesce((SELECT min(y.seq) FROM idempotency.outbox AS y WHERE y.published_at >= $1), 9223372036854775807)
$$;
COMMENT ON FUNCTION idempotency_internal.number_before(timestamptz) IS 'the number of the last event before a time';

-- Batches that are out end: their consumers get IK408.  Parked events and dead letters that the log
-- delivers again are deleted, so that no event comes twice, and so are parked events that are skipped.
CREATE FUNCTION idempotency_internal.move_subscription(name text, since timestamptz)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.locked_subscription('seek', name);
	count integer := (SELECT a.modulus FROM idempotency.partition AS a WHERE a.subscription = name AND a.stop IS NULL LIMIT 1);
	target bigint := CASE WHEN since > '-infinity' AND isfinite(since) THEN idempotency_internal.number_before(since) ELSE 0 END;
	dropped bigint;
BEGIN
	-- a write, which keeps the reaper out
	UPDATE idempotency.subscription AS e SET created_at = e.created_at WHERE e.subscription = name;
	DELETE FROM idempotency.partition AS a WHERE a.subscription = name;
	DELETE FROM idempotency.position AS n WHERE n.subscription = name;
	IF since = 'infinity' THEN
		PERFORM idempotency_internal.create_partitions_now(name, count);
	ELSE
		PERFORM idempotency_internal.create_partitions(name, count, '1:1:', '1', 0, 0, NULL);
		UPDATE idempotency.position AS n SET skip = target WHERE n.subscription = name;
	END IF;
	DELETE FROM idempotency.parked AS k
	WHERE k.subscription = name AND CASE
		WHEN since = 'infinity' OR k.seq <= target THEN k.dead_at IS NULL
		ELSE k.published_at < since AND k.dead_at IS NULL OR EXISTS (SELECT FROM idempotency.outbox AS o
			WHERE o.seq = k.seq AND o.aggregatetype LIKE ANY (s.patterns))
	END;
	GET DIAGNOSTICS dropped = ROW_COUNT;
	UPDATE idempotency.parked AS k SET partition = a.partition
	FROM idempotency.partition AS a
	WHERE k.subscription = name AND a.subscription = name AND a.remainder = k.bucket % a.modulus AND k.partition <> a.partition;
	-- those whose first event was deleted
	PERFORM idempotency_internal.schedule_queue(name, q.queue, NULL, NULL)
	FROM (SELECT DISTINCT k.queue FROM idempotency.parked AS k WHERE k.subscription = name AND k.dead_at IS NULL AND k.queue IS NOT NULL) AS q;
	PERFORM idempotency_internal.log_call('seek', format('subscription "%s" moved to %s, past %s failed or waiting events', name,
		CASE since WHEN 'infinity' THEN 'now' WHEN '-infinity' THEN 'the beginning' ELSE since::text END, dropped));
	RETURN dropped;
END
$$;
COMMENT ON FUNCTION idempotency_internal.move_subscription(text, timestamptz) IS 'move a subscription to a time; infinity: now; returns how many failed or waiting events it dropped';

CREATE FUNCTION idempotency.seek(subscription text, target timestamptz)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF target IS NULL OR target = 'infinity' THEN
		PERFORM idempotency_internal.raise('22023', 'target is missing', NULL, 'Pass a time, ''beginning'' or ''now''.');
	END IF;
	RETURN idempotency_internal.move_subscription(subscription, target);
END
$$;
COMMENT ON FUNCTION idempotency.seek(text, timestamptz) IS 'deliver the events that were published from a time on; returns how many failed or waiting events it dropped';

CREATE FUNCTION idempotency.seek(subscription text, target text)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF target = 'now' OR target = 'beginning' THEN
		RETURN idempotency_internal.move_subscription(subscription, CASE target WHEN 'now' THEN timestamptz 'infinity' ELSE '-infinity' END);
	END IF;
	RETURN idempotency.seek(subscription, target::timestamptz);
END
$$;
COMMENT ON FUNCTION idempotency.seek(text, text) IS
	'deliver from the beginning of the outbox, from now, or from a time on; returns how many failed or waiting events it dropped';

-- Dead letters go to the oldest generation of partitions, which is the one that delivers.
CREATE FUNCTION idempotency_internal.redrive_events(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.locked_subscription('redrive', subscription);
	now timestamptz := clock_timestamp();
	queues text[];
	redriven bigint;
	hastened bigint;
	queue text;
BEGIN
	WITH revived AS (
		UPDATE idempotency.parked AS k SET
			partition = a.partition, attempts = 0, alone = false, dead_at = NULL, first_failed_at = NULL,
			retry_at = CASE WHEN k.queue IS NULL THEN now END
		FROM idempotency.partition AS a
		WHERE k.subscription = s.subscription AND k.dead_at IS NOT NULL AND (event_id IS NULL OR k.id = event_id)
			AND a.subscription = k.subscription AND a.remainder = k.bucket % a.modulus
			AND a.generation = (SELECT min(g.generation) FROM idempotency.partition AS g WHERE g.subscription = k.subscription)
		RETURNING k.queue)
	SELECT count(*), array_agg(DISTINCT r.queue) FILTER (WHERE r.queue IS NOT NULL) INTO redriven, queues FROM revived AS r;
	-- Others are due now.  Those that have not failed keep the time that their publisher wants.
	UPDATE idempotency.parked AS k SET retry_at = now
	WHERE k.subscription = s.subscription AND k.retry_at > now AND k.first_failed_at IS NOT NULL AND (event_id IS NULL OR k.id = event_id);
	GET DIAGNOSTICS hastened = ROW_COUNT;
	redriven := redriven + hastened;
	FOREACH queue IN ARRAY coalesce(queues, '{}') LOOP
		PERFORM idempotency_internal.schedule_queue(s.subscription, queue, NULL, NULL);
	END LOOP;
	-- extension only
	PERFORM idempotency_internal.count_events('redriven', redriven);
	IF redriven > 0 AND s.handler IS NOT NULL THEN
		PERFORM idempotency_internal.wake_relay(subscription);
	END IF;
	-- both editions
	IF redriven > 0 THEN
		PERFORM idempotency_internal.log_call('redrive',
			format('%s %s of subscription "%s"', redriven, CASE redriven WHEN 1 THEN 'event' ELSE 'events' END, subscription));
	END IF;
	RETURN redriven;
END
$$;
COMMENT ON FUNCTION idempotency_internal.redrive_events(text, uuid) IS 'deliver a failed event again, now; NULL: all';

CREATE FUNCTION idempotency.redrive(subscription text)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.redrive_events(subscription, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.redrive(text) IS 'deliver dead letters again, and now what waits for its next attempt; returns how many events';

CREATE FUNCTION idempotency.redrive(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF event_id IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'event_id is missing', NULL, 'Pass the id of an event that failed, or leave it out for all of them.');
	END IF;
	RETURN idempotency_internal.redrive_events(subscription, event_id);
END
$$;
COMMENT ON FUNCTION idempotency.redrive(text, uuid) IS 'deliver one event that failed again, now; returns how many it was';

CREATE FUNCTION idempotency_internal.discard_events(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.locked_subscription('discard', subscription);
	discarded bigint;
BEGIN
	DELETE FROM idempotency.parked AS k
	WHERE k.subscription = s.subscription AND k.dead_at IS NOT NULL AND (event_id IS NULL OR k.id = event_id);
	GET DIAGNOSTICS discarded = ROW_COUNT;
	IF discarded > 0 THEN
		PERFORM idempotency_internal.log_call('discard',
			format('%s %s of subscription "%s"', discarded, CASE discarded WHEN 1 THEN 'dead letter' ELSE 'dead letters' END, subscription));
	END IF;
	RETURN discarded;
END
$$;
COMMENT ON FUNCTION idempotency_internal.discard_events(text, uuid) IS 'delete a dead letter; NULL: all';

CREATE FUNCTION idempotency.discard(subscription text)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.discard_events(subscription, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.discard(text) IS 'delete all dead letters; returns their number';

CREATE FUNCTION idempotency.discard(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF event_id IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'event_id is missing', NULL, 'Pass the id of a dead letter, or leave it out for all of them.');
	END IF;
	RETURN idempotency_internal.discard_events(subscription, event_id);
END
$$;
COMMENT ON FUNCTION idempotency.discard(text, uuid) IS 'delete one dead letter; returns how many it was';

-- Moves the positions of a subscription past events that are older than its max_lag.  Partitions
-- that are in use are left for the next call, and only those are locked that are moved.  Batches
-- that are out stay.
CREATE FUNCTION idempotency_internal.drop_lag(s idempotency.subscription)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	since timestamptz := clock_timestamp() - s.max_lag;
	target bigint;
	part idempotency.partition;
	p idempotency.position;
	unread bigint;
	is_old boolean;
	dropped bigint;
BEGIN
	FOR part IN
		SELECT a.* FROM idempotency.partition AS a WHERE a.subscription = s.subscription
	LOOP
		SELECT * INTO p FROM idempotency.position AS n
		WHERE n.subscription = s.subscription AND n.partition = part.partition
		ORDER BY n.version DESC LIMIT 1;
		-- the first that it has not read is old
		unread := greatest(p.skip, least(p.mark, p.range_from, p.reached, (SELECT min(f) FROM unnest(p.froms) AS f)));
		SELECT o.published_at < since INTO is_old FROM idempotency.outbox AS o
		WHERE o.seq > unread AND NOT pg_visible_in_snapshot(o.txid, p.base)
			AND (pg_visible_in_snapshot(o.txid, p.upto) AND o.seq <= p.reached) IS NOT TRUE
		ORDER BY o.seq LIMIT 1;
		CONTINUE WHEN is_old IS NOT TRUE;
		target := coalesce(target, idempotency_internal.number_before(since));
		SELECT count(*) INTO dropped FROM idempotency.outbox AS o
		WHERE o.seq > unread AND o.seq <= target
			AND NOT pg_visible_in_snapshot(o.txid, p.base)
			AND (pg_visible_in_snapshot(o.txid, p.upto) AND o.seq <= p.reached) IS NOT TRUE
			AND (part.stop IS NULL OR pg_visible_in_snapshot(o.txid, part.stop))
			AND o.bucket % part.modulus = part.remainder AND o.aggregatetype LIKE ANY (s.patterns);
		CONTINUE WHEN dropped = 0;
		PERFORM FROM idempotency.partition AS a
		WHERE a.subscription = s.subscription AND a.partition = part.partition
		FOR UPDATE SKIP LOCKED;
		IF FOUND AND p.version = (SELECT max(n.version) FROM idempotency.position AS n
			WHERE n.subscription = s.subscription AND n.partition = part.partition) THEN
			RAISE LOG 'idempotency subscription "%" dropped events older than its max_lag, up to number %', s.subscription, target;
			-- extension only
			PERFORM idempotency_internal.count_events('events_dropped', dropped);
			-- both editions
			p.skip := target;
			PERFORM idempotency_internal.put_position(p);
		END IF;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.drop_lag(idempotency.subscription) IS 'skip events that are older than max_lag';

-- Deletes dead letters after their retention, and events of the log that every position has
-- passed and that are older than idempotency.outbox_retention.  A position has passed what its
-- "base" shows up to "top", what it has read of "upto", and all numbers that it can never read
-- again; events in its list are kept.  While a subscription is being created or moved, whose position
-- is invisible, it deletes none, and so it does under an old snapshot.
CREATE FUNCTION idempotency_internal.reap_events(max_rows bigint, retention interval DEFAULT NULL)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
	SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	setting text := idempotency_internal.setting('outbox_retention');
	s idempotency.subscription;
	highest bigint;
	next record;
	leaving tid[] := '{}';
	reaped bigint := 0;
	deleted bigint;
BEGIN
	retention := coalesce(retention, CASE setting WHEN '' THEN interval '24:00:00' ELSE idempotency_internal.duration(setting, 's') END);
	IF retention IS NULL OR retention < interval '0' AND retention <> interval '-1 s' THEN
		PERFORM idempotency_internal.raise_setting('outbox_retention', setting, 'It must be from 0 to 2147483647 seconds, or -1 (forever).',
			'Use an interval such as ''1 day'', or a number of seconds.');
	ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
		RETURN 0;
	END IF;
	BEGIN
		LOCK TABLE idempotency.subscription IN SHARE MODE NOWAIT;
	EXCEPTION
		WHEN lock_not_available THEN
			RETURN 0;
	END;
	FOR s IN SELECT * FROM idempotency.subscription AS e WHERE e.dead_letter_retention IS NOT NULL LOOP
		DELETE FROM idempotency.parked AS k
		WHERE k.ctid = ANY (ARRAY(SELECT e.ctid FROM idempotency.parked AS e
			WHERE e.subscription = s.subscription AND e.dead_at < clock_timestamp() - s.dead_letter_retention
			LIMIT max_rows FOR UPDATE SKIP LOCKED));
		GET DIAGNOSTICS deleted = ROW_COUNT;
		reaped := reaped + deleted;
	END LOOP;
	FOR s IN SELECT * FROM idempotency.subscription AS e WHERE e.max_lag IS NOT NULL LOOP
		PERFORM idempotency_internal.drop_lag(s);
	END LOOP;
	IF retention = interval '-1 s' THEN
		RETURN reaped;
	END IF;

	-- No position has passed a greater number, or few.  A restore loads events before positions, and sets
	-- the sequence after both.
	SELECT least(min(greatest(n.skip, CASE WHEN n.upto IS NULL THEN n.top ELSE n.reached END)),
		coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0))
	INTO highest
	FROM idempotency.position AS n;
	-- The first young event ends the search, so that it does not read all that are kept
	FOR next IN
		SELECT o.ctid, o.published_at BETWEEN clock_timestamp() - retention AND clock_timestamp() + retention AS is_young,
			EXISTS (SELECT FROM idempotency.position AS n
				WHERE o.seq = ANY (n.events)
					OR o.seq > n.skip
						AND o.seq > CASE WHEN n.former_base IS NOT NULL THEN n.reached
							ELSE least(n.mark, n.range_from, (SELECT min(f) FROM unnest(n.froms) AS f)) END
						AND (n.former_base IS NOT NULL OR o.seq > n.top OR NOT pg_visible_in_snapshot(o.txid, n.base))
						AND (pg_visible_in_snapshot(o.txid, n.upto) AND o.seq <= n.reached) IS NOT TRUE) AS is_needed
		FROM idempotency.outbox AS o
		WHERE o.seq <= highest
		ORDER BY o.seq
	LOOP
		EXIT WHEN next.is_young AND retention > interval '0' OR cardinality(leaving) >= max_rows - reaped;
		IF NOT next.is_needed THEN
			leaving := leaving || next.ctid;
		END IF;
	END LOOP;
	DELETE FROM idempotency.outbox AS o
	WHERE o.ctid = ANY (ARRAY(SELECT l.ctid FROM idempotency.outbox AS l WHERE l.ctid = ANY (leaving) FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS deleted = ROW_COUNT;
	RETURN reaped + deleted;
END
$$;
COMMENT ON FUNCTION idempotency_internal.reap_events(bigint, interval) IS 'delete events that every subscription has passed, and old dead letters';

