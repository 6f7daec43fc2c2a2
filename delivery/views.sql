-- ---------------------------------------------------------------------------
-- What operators see
-- ---------------------------------------------------------------------------

CREATE VIEW idempotency.dead_letters AS
	SELECT
		k.subscription,
		k.id AS event_id,
		k.aggregatetype AS topic,
		k.aggregateid AS aggregate_id,
		k.type,
		k.error,
		k.attempts,
		k.first_failed_at,
		k.last_failed_at,
		k.published_at,
		k.payload,
		k.headers,
		k.seq
	FROM idempotency.parked AS k, (SELECT) AS read_only
	WHERE k.dead_at IS NOT NULL;
COMMENT ON VIEW idempotency.dead_letters IS 'events that are no longer retried; redrive() delivers them again, discard() deletes them';
COMMENT ON COLUMN idempotency.dead_letters.subscription IS 'the subscription in which the event failed';
COMMENT ON COLUMN idempotency.dead_letters.event_id IS 'the event''s id';
COMMENT ON COLUMN idempotency.dead_letters.topic IS 'the topic';
COMMENT ON COLUMN idempotency.dead_letters.aggregate_id IS 'the object of the event';
COMMENT ON COLUMN idempotency.dead_letters.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.dead_letters.error IS 'the last error';
COMMENT ON COLUMN idempotency.dead_letters.attempts IS 'number of deliveries that failed';
COMMENT ON COLUMN idempotency.dead_letters.first_failed_at IS 'when the event first failed';
COMMENT ON COLUMN idempotency.dead_letters.last_failed_at IS 'when the event last failed';
COMMENT ON COLUMN idempotency.dead_letters.published_at IS 'when the event was published';
COMMENT ON COLUMN idempotency.dead_letters.payload IS 'the payload';
COMMENT ON COLUMN idempotency.dead_letters.headers IS 'metadata';
COMMENT ON COLUMN idempotency.dead_letters.seq IS 'the event''s number in the outbox';

-- The first event of a partition that was published and is neither read nor in its list; see
-- scan.sql.  The planner expects few rows from conditions, and would sort all unread events, with
-- JIT compilation; it expects half of the rows from CASE.
CREATE VIEW idempotency.partitions AS
	SELECT
		a.subscription,
		a.remainder AS partition,
		a.modulus AS partitions,
		CASE
			WHEN a.generation > min(a.generation) OVER (PARTITION BY a.subscription) THEN 'waiting'
			WHEN s.paused_at IS NOT NULL THEN 'paused'
			WHEN a.stop IS NOT NULL THEN 'ending'
			ELSE 'delivering'
		END AS state,
		date_trunc('second', clock_timestamp() - least(unread.published_at, listed.published_at)) AS lag,
		coalesce(last.seq - unread.seq + 1, 0) + cardinality(n.events) AS lag_events,
		n.size AS batch_events,
		CASE WHEN n.size > 0 THEN n.failures + 1 END AS attempt,
		n.holder,
		n.leased_at,
		n.leased_until,
		n.acknowledged,
		n.failed
	FROM idempotency.partition AS a
	JOIN idempotency.subscription AS s ON s.subscription = a.subscription
	CROSS JOIN LATERAL (
		SELECT o.* FROM idempotency.position AS o
		WHERE o.subscription = a.subscription AND o.partition = a.partition
		ORDER BY o.version DESC LIMIT 1
	) AS n
	LEFT JOIN LATERAL (
		SELECT o.seq, o.published_at FROM idempotency.outbox AS o
		WHERE o.seq > greatest(n.skip, least(n.mark, n.range_from, n.reached, (SELECT min(f) FROM unnest(n.froms) AS f)))
			AND CASE
				WHEN o.bucket % a.modulus <> a.remainder OR NOT o.aggregatetype LIKE ANY (s.patterns) OR NOT pg_visible_in_snapshot(o.txid, a.stop) THEN false
				WHEN n.former_base IS NOT NULL AND o.seq <= n.mark
				THEN o.seq > n.reached AND (o.seq <= n.former_top AND pg_visible_in_snapshot(o.txid, n.former_base)) IS NOT TRUE
				ELSE NOT pg_visible_in_snapshot(o.txid, n.base)
					AND (n.upto IS NOT NULL AND pg_visible_in_snapshot(o.txid, n.upto) AND o.seq <= n.reached) IS NOT TRUE
			END
		ORDER BY o.seq LIMIT 1
	) AS unread ON true
	LEFT JOIN LATERAL (
		SELECT min(o.published_at) AS published_at FROM idempotency.outbox AS o WHERE o.seq = ANY (n.events)
	) AS listed ON true
	CROSS JOIN (SELECT max(o.seq) AS seq FROM idempotency.outbox AS o) AS last;
COMMENT ON VIEW idempotency.partitions IS 'the progress of each partition of a subscription, and its batch';
COMMENT ON COLUMN idempotency.partitions.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.partitions.partition IS 'the partition, from 0 on';
COMMENT ON COLUMN idempotency.partitions.partitions IS 'number of partitions';
COMMENT ON COLUMN idempotency.partitions.state IS 'delivering, paused, ending after a change of the number of partitions, or waiting for those that end';
COMMENT ON COLUMN idempotency.partitions.lag IS 'age of the oldest event that was not acknowledged, without parked events, in full seconds; NULL: none';
COMMENT ON COLUMN idempotency.partitions.lag_events IS 'numbers from the oldest event that was not delivered to the newest one, and events that were not acknowledged: an upper bound';
COMMENT ON COLUMN idempotency.partitions.batch_events IS 'number of events in the batch';
COMMENT ON COLUMN idempotency.partitions.attempt IS 'number of deliveries of the batch; NULL: none is out';
COMMENT ON COLUMN idempotency.partitions.holder IS 'process id of the session that fetched the batch';
COMMENT ON COLUMN idempotency.partitions.leased_at IS 'when the batch was leased; NULL: none is out';
COMMENT ON COLUMN idempotency.partitions.leased_until IS 'when the lease ends';
COMMENT ON COLUMN idempotency.partitions.acknowledged IS 'number of events acknowledged';
COMMENT ON COLUMN idempotency.partitions.failed IS 'number of deliveries of an event that failed, also those that were retried';

CREATE VIEW idempotency.subscriptions AS
	SELECT
		s.subscription,
		(SELECT max(a.lag) FROM idempotency.partitions AS a WHERE a.subscription = s.subscription) AS lag,
		k.scheduled,
		k.waiting,
		k.dead,
		-- portable only
		CASE
			WHEN k.last_error IS NULL OR has_table_privilege('idempotency.dead_letters', 'SELECT')
			THEN k.last_error
			ELSE '<insufficient privilege>'
		END AS last_error,
		-- extension only
		CASE
			WHEN coalesce(p.problem, k.last_error) IS NULL OR has_table_privilege('idempotency.dead_letters', 'SELECT')
			THEN coalesce(p.problem, k.last_error)
			ELSE '<insufficient privilege>'
		END AS last_error,
		-- both editions
		k.last_error_at,
		k.oldest_parked_at,
		s.owner,
		s.topics,
		s.handler,
		(SELECT a.modulus FROM idempotency.partition AS a WHERE a.subscription = s.subscription AND a.stop IS NULL LIMIT 1) AS partitions,
		s.max_attempts,
		s.retry_delay,
		s.max_retry_delay,
		s.max_lag,
		s.dead_letter_retention,
		s.paused_at,
		s.created_at
	FROM idempotency.subscription AS s
	LEFT JOIN LATERAL (
		SELECT
			count(e.retry_at) AS scheduled,
			count(*) FILTER (WHERE e.retry_at IS NULL AND e.dead_at IS NULL) AS waiting,
			count(e.dead_at) AS dead,
			(array_agg(e.error ORDER BY e.last_failed_at DESC) FILTER (WHERE e.last_failed_at IS NOT NULL))[1] AS last_error,
			max(e.last_failed_at) AS last_error_at,
			min(e.first_failed_at) FILTER (WHERE e.dead_at IS NULL) AS oldest_parked_at
		FROM idempotency.parked AS e
		WHERE e.subscription = s.subscription
	) AS k ON true
	-- extension only
	CROSS JOIN LATERAL (SELECT idempotency_internal.relay_problem(s.subscription) AS problem) AS p
	-- both editions
;
COMMENT ON VIEW idempotency.subscriptions IS 'the options of each subscription, and what delays it';
COMMENT ON COLUMN idempotency.subscriptions.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.subscriptions.lag IS 'the greatest lag of a partition';
COMMENT ON COLUMN idempotency.subscriptions.scheduled IS 'events that failed and are retried, or that are not due yet';
COMMENT ON COLUMN idempotency.subscriptions.waiting IS 'later events of the same aggregates, which are blocked';
COMMENT ON COLUMN idempotency.subscriptions.dead IS 'dead letters';
COMMENT ON COLUMN idempotency.subscriptions.last_error IS 'the last error of a parked event or dead letter; for roles that can read dead_letters';
COMMENT ON COLUMN idempotency.subscriptions.last_error_at IS 'when that error occurred';
COMMENT ON COLUMN idempotency.subscriptions.oldest_parked_at IS 'the earliest first failure of an event that will be retried';
COMMENT ON COLUMN idempotency.subscriptions.owner IS 'the role whose members can use the subscription';
COMMENT ON COLUMN idempotency.subscriptions.topics IS 'patterns of topics';
COMMENT ON COLUMN idempotency.subscriptions.handler IS 'the function that deliver() calls for the owner; NULL: none';
COMMENT ON COLUMN idempotency.subscriptions.partitions IS 'number of partitions';
COMMENT ON COLUMN idempotency.subscriptions.max_attempts IS 'number of failures after which an event becomes a dead letter';
COMMENT ON COLUMN idempotency.subscriptions.retry_delay IS 'delay of the first retry';
COMMENT ON COLUMN idempotency.subscriptions.max_retry_delay IS 'longest delay of a retry';
COMMENT ON COLUMN idempotency.subscriptions.max_lag IS 'age at which an undelivered event is dropped; NULL: never';
COMMENT ON COLUMN idempotency.subscriptions.dead_letter_retention IS 'age at which a dead letter is deleted; NULL: never';
COMMENT ON COLUMN idempotency.subscriptions.paused_at IS 'since when nothing is delivered; NULL: it is not paused';
COMMENT ON COLUMN idempotency.subscriptions.created_at IS 'when the subscription was created';

-- portable only
-- A layout that distributes the keys over several servers has no outbox, because a position
-- compares transactions of one server: see citus.sql.
CREATE FUNCTION idempotency_internal.delivery_routines()
	RETURNS text[]
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT '{refuse_update,event_headers,publish,next_id,snapshot,has_published,is_foreign,open_transactions,
		raise_sequence,begin_window,begin_here,end_window,is_due,park_blocked,read_log,caller,log_call,clipped_error,
		subscription_of,raise_in_use,locked_subscription,patterns_of,create_partitions,create_partitions_now,
		handler_text,check_handler_owner,change,subscribe,alter_subscription,unsubscribe,raise_altered,put_position,
		schedule_queue,fail_event,take_parked,end_generation,next_batch,due_partitions,fetch,has_more,batch_of,ack_events,ack,nack,extend,pause,
		resume,number_before,move_subscription,seek,redrive_events,redrive,discard_events,discard,drop_lag,reap_events,handler_of,end_event,deliver}'::text[]
$$;
COMMENT ON FUNCTION idempotency_internal.delivery_routines() IS 'the names of the functions of the outbox';
-- both editions

