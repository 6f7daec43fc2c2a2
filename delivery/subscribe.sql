-- ---------------------------------------------------------------------------
-- Subscriptions
-- ---------------------------------------------------------------------------

-- The role that calls: that of the session, since the functions run with the rights of
-- their owner.  In a security-restricted operation (ANALYZE, also of autovacuum, CREATE INDEX,
-- REFRESH MATERIALIZED VIEW, ...), the code of a table's owner runs in the session of another
-- role: it gets 42501.
-- extension only
CREATE FUNCTION idempotency_internal.caller()
	RETURNS name
	LANGUAGE C STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_caller';
-- portable only
-- That is for UNLISTEN, which does nothing else.  A session that listens to another channel cannot
-- PREPARE TRANSACTION then.
CREATE FUNCTION idempotency_internal.caller()
	RETURNS name
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	UNLISTEN idempotency_internal;
	RETURN CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role')::name END;
END
$$;
-- both editions
COMMENT ON FUNCTION idempotency_internal.caller() IS 'the role that called a function of the owner';

-- Logs a call that changes or deletes what others rely on.
CREATE FUNCTION idempotency_internal.log_call(function text, what text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	RAISE LOG 'idempotency.%() by role "%": %', function, idempotency_internal.caller(), what;
END
$$;
COMMENT ON FUNCTION idempotency_internal.log_call(text, text) IS 'log a call of an owner or an operator';

-- The first 8 kB of whole characters, each of which has 4 bytes at most.
CREATE FUNCTION idempotency_internal.clipped_error(error text)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
	clipped text := left(error, 8192);
BEGIN
	WHILE octet_length(clipped) > 8192 LOOP
		clipped := left(clipped, -greatest((octet_length(clipped) - 8192) / 4, 1));
	END LOOP;
	RETURN clipped;
END
$$;
COMMENT ON FUNCTION idempotency_internal.clipped_error(text) IS 'how much of an error is kept';

-- The subscription of that name.  Raises 42704 if there is none, and 42501 if the caller does
-- not have the privileges of its owner, or is not known.
CREATE FUNCTION idempotency_internal.subscription_of(name text)
	RETURNS idempotency.subscription
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	caller name := idempotency_internal.caller();
	s idempotency.subscription;
BEGIN
	SELECT * INTO s FROM idempotency.subscription AS e WHERE e.subscription = name COLLATE "C";
	IF s.subscription IS NULL THEN
		PERFORM idempotency_internal.check_name('subscription', name);
		PERFORM idempotency_internal.raise('42704', format('subscription "%s" does not exist', name), NULL,
			'Use idempotency.subscribe() to create it; the view idempotency.subscriptions lists all.');
	ELSIF s.owner <> caller THEN
		IF NOT EXISTS (SELECT FROM pg_roles AS r
			WHERE r.rolname = caller
				AND (r.rolsuper OR EXISTS (SELECT FROM pg_roles AS o WHERE o.rolname = s.owner AND pg_has_role(r.oid, o.oid, 'USAGE')))) THEN
			PERFORM idempotency_internal.raise('42501', format('permission denied for subscription "%s"', name),
				format('Its owner is "%s".', s.owner), 'Call as a role that has the privileges of the owner.');
		END IF;
	END IF;
	RETURN s;
END
$$;
COMMENT ON FUNCTION idempotency_internal.subscription_of(text) IS 'a subscription that the caller can use';

CREATE FUNCTION idempotency_internal.raise_in_use(name text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('55P03', format('subscription "%s" is in use', $1),
		'Another transaction that fetched, acknowledged, changed it or called reap() is still open.', 'Try again, or set idempotency.wait higher.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_in_use(text) IS '55P03: another transaction uses the subscription';

-- Raises 25006 if the transaction cannot write, and 25001 if its snapshot stays: what others have published, read
-- or deleted since then would be lost or come twice.
CREATE FUNCTION idempotency_internal.check_transaction(function text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only(function);
	ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
		PERFORM idempotency_internal.raise('25001', format('idempotency.%s() works in READ COMMITTED only', function),
			'A fixed snapshot does not show what other transactions have changed since.', 'Use SET TRANSACTION ISOLATION LEVEL READ COMMITTED; before CALL, SET default_transaction_isolation = ''read committed''.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_transaction(text) IS '25006, 25001: the transaction cannot read events';

-- The subscription of that name, locked with all its partitions to the end of the transaction:
-- no consumer uses it meanwhile.  Waits for consumers' transactions for idempotency.wait.
CREATE FUNCTION idempotency_internal.locked_subscription(function text, name text)
	RETURNS idempotency.subscription
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	bounded boolean;
	s idempotency.subscription;
BEGIN
	PERFORM idempotency_internal.check_transaction(function);
	s := idempotency_internal.subscription_of(name);
	BEGIN
		bounded := idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait()));
		-- a transaction that has called reap() holds it in SHARE mode
		LOCK TABLE idempotency.subscription IN ROW EXCLUSIVE MODE;
		PERFORM FROM idempotency.subscription AS e WHERE e.subscription = s.subscription FOR UPDATE;
		PERFORM FROM idempotency.partition AS a WHERE a.subscription = s.subscription ORDER BY a.partition FOR UPDATE;
		PERFORM set_config('lock_timeout', lock_timeout, true);
	EXCEPTION
		WHEN lock_not_available THEN
			IF NOT bounded THEN
				RAISE;
			END IF;
			PERFORM idempotency_internal.raise_in_use(name);
	END;
	-- as it is now
	RETURN idempotency_internal.subscription_of(name);
END
$$;
COMMENT ON FUNCTION idempotency_internal.locked_subscription(text, text) IS
	'a subscription that the caller can use, locked with all its partitions';

-- Raises 22023, or IK400, for patterns of topics that cannot be used; returns them for LIKE.
CREATE FUNCTION idempotency_internal.patterns_of(topics text[])
	RETURNS text[]
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	pattern text;
	character text;
	escaped boolean;
	converted text;
	patterns text[] := '{}';
BEGIN
	IF array_ndims(topics) IS DISTINCT FROM 1 OR array_position(topics, NULL) IS NOT NULL THEN
		PERFORM idempotency_internal.raise('22023', 'topics must be a list of patterns', NULL,
			'Pass at least one, such as ARRAY[''order.*''], and no NULL.');
	ELSIF cardinality(topics) > 1000 THEN
		-- the reaper and publishers compare all of them
		PERFORM idempotency_internal.raise('22023', 'topics must be 1000 patterns at most', NULL, 'Use * for several topics.');
	END IF;
	FOREACH pattern IN ARRAY topics LOOP
		PERFORM idempotency_internal.check_name('topic', pattern);
		converted := '';
		escaped := false;
		FOREACH character IN ARRAY string_to_array(pattern, NULL) LOOP
			converted := converted || CASE
				WHEN escaped OR character IN ('%', '_') THEN E'\\' || character
				WHEN character = '*' THEN '%'
				WHEN character = E'\\' THEN ''
				ELSE character
			END;
			escaped := character = E'\\' AND NOT escaped;
		END LOOP;
		IF escaped THEN
			PERFORM idempotency_internal.raise('22023', 'pattern of topics ends in a backslash', NULL,
				'A backslash escapes the next character; write two for one.');
		END IF;
		patterns := patterns || converted;
	END LOOP;
	RETURN patterns;
END
$$;
COMMENT ON FUNCTION idempotency_internal.patterns_of(text[]) IS 'patterns of topics as patterns of LIKE';

-- Makes a generation of partitions that begins at a snapshot; "model" is a position that has read
-- less, or NULL.  From the beginning, rows of another cluster can have ids that are not used here
-- yet, and are read as after a restore.
CREATE FUNCTION idempotency_internal.create_partitions(
	name text, partitions integer, base pg_snapshot, born xid8, mark bigint, top bigint, model idempotency.position)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	started record := idempotency_internal.open_transactions(model, base);
	is_foreign boolean := mark = 0 AND EXISTS (SELECT FROM idempotency.outbox AS o
		WHERE o.txid >= pg_snapshot_xmax(pg_current_snapshot()) AND o.txid IS DISTINCT FROM pg_current_xact_id_if_assigned());
	next integer;
	first integer;
BEGIN
	IF partitions NOT BETWEEN 1 AND 256 THEN
		PERFORM idempotency_internal.raise('22023', 'partitions must be from 1 to 256', NULL,
			'Pass how many consumers can have a batch at a time.');
	END IF;
	SELECT coalesce(max(a.generation), 0) + 1,
		CASE WHEN coalesce(min(a.partition), partitions) >= partitions THEN 0 ELSE max(a.partition) + 1 END
	INTO next, first
	FROM idempotency.partition AS a WHERE a.subscription = name;
	IF first + partitions > 1024 THEN
		PERFORM idempotency_internal.raise('55000', format('subscription "%s" has too many partitions', name),
			'Those of earlier changes have events to deliver, and count.', 'Try again when the view idempotency.partitions shows fewer.');
	END IF;
	INSERT INTO idempotency.partition (subscription, partition, generation, remainder, modulus)
	SELECT name, first + r, next, r, partitions FROM generate_series(0, partitions - 1) AS r;
	INSERT INTO idempotency.position (subscription, partition, version, changed_at, system_identifier, relation, base, born, mark, top,
		xids, froms, range_from, reached, skip, ended, events, size, retried, failures, alone, acknowledged, failed)
	SELECT name, first + r, 1, clock_timestamp(), CASE WHEN NOT is_foreign THEN c.system_identifier ELSE 0 END,
		'idempotency.outbox'::regclass::oid, base, born, mark, top,
		-- without a model, "born" is that of a subtransaction that has ended: no id is between the end of "base" and it
		started.xids, started.froms, coalesce(started.range_from, mark), mark, 0, false, '{}', 0, false, 0, false, 0, 0
	FROM generate_series(0, partitions - 1) AS r, pg_control_system() AS c;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise_altered('position');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.create_partitions(text, integer, pg_snapshot, xid8, bigint, bigint, idempotency.position) IS
	'create partitions and their positions';

-- The same from now on: what is visible now is left out, and what is in progress is not.  Any
-- position of this cluster knows numbers below those of transactions in progress.  A current partition
-- of another cluster cannot end at a snapshot of this one, and begins to read here before.
CREATE FUNCTION idempotency_internal.create_partitions_now(name text, partitions integer)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	p idempotency.position;
	drawn bigint;
	born xid8;
	base pg_snapshot;
	top bigint;
	model idempotency.position;
BEGIN
	FOR p IN
		SELECT n.* FROM idempotency.partition AS a JOIN idempotency.position AS n USING (subscription, partition)
		WHERE a.subscription = name AND a.stop IS NULL AND idempotency_internal.is_foreign(n)
	LOOP
		IF p.upto IS NOT NULL THEN
			PERFORM idempotency_internal.raise('55000', format('subscription "%s" has not read the events of its restore', name), NULL,
				'Call idempotency.fetch() and idempotency.ack() first.');
		END IF;
		PERFORM idempotency_internal.put_position(idempotency_internal.begin_here(p));
	END LOOP;
	drawn := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	born := idempotency_internal.next_id();
	base := idempotency_internal.snapshot();
	top := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	SELECT n.* INTO model
	FROM idempotency.position AS n
	WHERE NOT idempotency_internal.is_foreign(n)
	ORDER BY n.mark DESC
	LIMIT 1;
	UPDATE idempotency.partition AS a SET stop = base, stop_born = born, stop_mark = drawn, stop_top = top
	WHERE a.subscription = name AND a.stop IS NULL;
	PERFORM idempotency_internal.create_partitions(name, partitions, base, born, drawn, top, model);
END
$$;
COMMENT ON FUNCTION idempotency_internal.create_partitions_now(text, integer) IS
	'create partitions that begin now, and end the current ones here';

-- Raises an error unless a function can handle events; returns its stored form.
CREATE FUNCTION idempotency_internal.handler_text(handler regprocedure)
	RETURNS text
	LANGUAGE plpgsql STABLE STRICT PARALLEL SAFE
AS $$
DECLARE
	routine record;
BEGIN
	SELECT n.nspname, p.proname, p.prokind = 'f' AND NOT p.proretset AND p.prorettype = 'void'::regtype
		AND p.pronargs = 1 AND p.proargtypes[0] = 'idempotency.event'::regtype AS fits
	INTO routine
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
	WHERE p.oid = handler;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise('42883', format('handler with OID %s does not exist', handler::oid), NULL,
			'Pass a function as regprocedure.');
	ELSIF NOT routine.fits THEN
		PERFORM idempotency_internal.raise('42P13', format('function %s cannot handle events', handler), NULL,
			'A handler takes one idempotency.event and returns void.');
	END IF;
	RETURN format('%I.%I(idempotency.event)', routine.nspname, routine.proname);
END
$$;
COMMENT ON FUNCTION idempotency_internal.handler_text(regprocedure) IS 'the stored form of a handler';

-- Raises 42501 unless the owner of a handler's function, which can replace its body, can act as
-- the owner of the subscription anyway.
CREATE FUNCTION idempotency_internal.check_handler_owner(handler text, owner name)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
DECLARE
	rights text := CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'SET' ELSE 'MEMBER' END;
	function_owner name;
BEGIN
	SELECT r.rolname INTO function_owner
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace JOIN pg_roles AS r ON r.oid = p.proowner
	WHERE format('%I.%I(idempotency.event)', n.nspname, p.proname) = handler
		AND p.pronargs = 1 AND p.proargtypes[0] = 'idempotency.event'::regtype
		AND NOT EXISTS (SELECT FROM pg_roles AS o WHERE o.rolname = owner
			AND (pg_has_role(r.oid, o.oid, 'USAGE') OR pg_has_role(r.oid, o.oid, rights)));
	IF FOUND THEN
		PERFORM idempotency_internal.raise('42501',
			format('owner "%s" of handler %s does not have the privileges of role "%s"', function_owner, handler, owner),
			'The owner of a function can replace its body at any time, and the handler runs with the privileges of the subscription''s owner.',
			'Use ALTER FUNCTION ... OWNER TO to make the subscription''s owner the owner of the handler.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_handler_owner(text, name) IS
	'raise an error unless the owner of a handler can act as the owner of the subscription';

-- Changes the options that are not NULL.  Logs a change as one by the function, if that is not NULL.
CREATE FUNCTION idempotency_internal.change(
	function text, name text, new_topics text[], new_handler regprocedure, new_max_attempts integer, new_retry_delay interval,
	new_max_retry_delay interval, new_max_lag interval, new_retention interval, new_partitions integer, new_owner regrole)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	never CONSTANT interval := '-1 second';
	caller name := idempotency_internal.caller();
	rights text := CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'SET' ELSE 'MEMBER' END;
	owner_name name;
	stored idempotency.subscription;
	changed idempotency.subscription;
	is_changed boolean := false;
BEGIN
	IF new_max_attempts < 1 THEN
		PERFORM idempotency_internal.raise('22023', 'max_attempts must be positive', NULL,
			'Pass after how many failures an event is a dead letter.');
	END IF;
	PERFORM idempotency_internal.raise('22023', format('%s must not be negative', d.what), NULL, 'Pass an interval such as ''1 second'', or leave it out.')
	FROM (VALUES ('retry_delay', new_retry_delay), ('max_retry_delay', new_max_retry_delay), ('max_lag', nullif(new_max_lag, never)),
		('dead_letter_retention', nullif(new_retention, never))) AS d (what, value)
	WHERE d.value < interval '0';
	IF new_owner IS NOT NULL THEN
		SELECT r.rolname INTO owner_name FROM pg_roles AS r WHERE r.oid = new_owner;
		IF NOT FOUND THEN
			PERFORM idempotency_internal.raise('42704', format('role with OID %s does not exist', new_owner::oid), NULL, 'Pass the name of a role.');
		ELSIF NOT pg_has_role(caller, owner_name, rights) THEN
			PERFORM idempotency_internal.raise('42501', format('must be a member of role "%s" to let it own a subscription', owner_name), NULL,
				'Leave out the owner, or let a member of that role subscribe.');
		END IF;
	END IF;
	SELECT * INTO stored FROM idempotency.subscription AS s WHERE s.subscription = name;
	UPDATE idempotency.subscription AS s SET
		owner = coalesce(owner_name, s.owner),
		topics = coalesce(new_topics, s.topics),
		patterns = CASE WHEN new_topics IS NULL THEN s.patterns ELSE idempotency_internal.patterns_of(new_topics) END,
		handler = CASE new_handler::oid WHEN 0 THEN NULL ELSE coalesce(idempotency_internal.handler_text(new_handler), s.handler) END,
		max_attempts = coalesce(new_max_attempts, s.max_attempts),
		retry_delay = coalesce(new_retry_delay, s.retry_delay),
		max_retry_delay = coalesce(new_max_retry_delay, s.max_retry_delay),
		max_lag = nullif(coalesce(new_max_lag, s.max_lag), never),
		dead_letter_retention = nullif(coalesce(new_retention, s.dead_letter_retention), never)
	WHERE s.subscription = name
	RETURNING * INTO changed;
	is_changed := changed IS DISTINCT FROM stored;
	-- extension only
	IF changed.handler IS NOT NULL THEN
		IF new_handler IS NOT NULL OR new_owner IS NOT NULL THEN
			PERFORM idempotency_internal.check_handler(changed.handler, changed.owner);
		END IF;
		PERFORM idempotency_internal.wake_relay(name);
	END IF;
	-- portable only
	IF changed.handler IS NOT NULL AND (new_handler IS NOT NULL OR new_owner IS NOT NULL) THEN
		PERFORM idempotency_internal.check_handler_owner(changed.handler, changed.owner);
	END IF;
	-- both editions
	IF new_partitions <> (SELECT a.modulus FROM idempotency.partition AS a WHERE a.subscription = name AND a.stop IS NULL LIMIT 1) THEN
		PERFORM idempotency_internal.create_partitions_now(name, new_partitions);
		is_changed := true;
	END IF;
	IF is_changed AND function IS NOT NULL THEN
		PERFORM idempotency_internal.log_call(function, format('subscription "%s" of role "%s" %s', name, stored.owner,
			CASE changed.owner WHEN stored.owner THEN 'was changed' ELSE format('belongs to role "%s" now', changed.owner) END));
	END IF;
	RETURN is_changed;
END
$$;
COMMENT ON FUNCTION idempotency_internal.change(text, text, text[], regprocedure, integer, interval, interval, interval, interval, integer, regrole) IS
	'change options of a subscription; true if one had another value';

CREATE FUNCTION idempotency.subscribe(
	subscription text, topics text[], handler regprocedure DEFAULT NULL, start_at text DEFAULT NULL,
	max_attempts integer DEFAULT NULL, retry_delay interval DEFAULT NULL, max_retry_delay interval DEFAULT NULL,
	max_lag interval DEFAULT NULL, owner regrole DEFAULT NULL, partitions integer DEFAULT NULL,
	dead_letter_retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	bounded boolean;
	is_new boolean;
	stored text;
BEGIN
	PERFORM idempotency_internal.check_name('subscription', subscription);
	PERFORM idempotency_internal.check_transaction('subscribe');
	IF start_at NOT IN ('now', 'beginning') THEN
		PERFORM idempotency_internal.raise('22023', 'start_at must be ''now'' or ''beginning''', NULL,
			'Pass ''beginning'' for the events that the outbox still has, or omit it.');
	ELSIF topics IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'topics are missing', NULL, 'Pass patterns, such as ARRAY[''order.*''].');
	END IF;
	BEGIN
		bounded := idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait()));
		INSERT INTO idempotency.subscription AS s (subscription, owner, topics, patterns, start_at, max_attempts, retry_delay, max_retry_delay, created_at)
		VALUES (subscribe.subscription, idempotency_internal.caller(), subscribe.topics, idempotency_internal.patterns_of(topics),
			coalesce(subscribe.start_at, 'now'), 10, '1 second', '1 hour', clock_timestamp())
		ON CONFLICT DO NOTHING;
		is_new := FOUND;
		PERFORM set_config('lock_timeout', lock_timeout, true);
	EXCEPTION
		WHEN lock_not_available THEN
			IF NOT bounded THEN
				RAISE;
			END IF;
			PERFORM idempotency_internal.raise_in_use(subscription);
	END;
	IF NOT is_new THEN
		stored := (idempotency_internal.locked_subscription('subscribe', subscription)).start_at;
		IF start_at <> stored THEN
			PERFORM idempotency_internal.raise('55000', format('subscription "%s" exists, and started at ''%s''', subscription, stored), NULL,
				'Omit start_at, or call idempotency.seek() to move the subscription.');
		END IF;
	ELSIF start_at = 'beginning' THEN
		PERFORM idempotency_internal.create_partitions(subscription, coalesce(partitions, 1), '1:1:', '1', 0, 0, NULL);
	ELSE
		PERFORM idempotency_internal.create_partitions_now(subscription, coalesce(partitions, 1));
	END IF;
	PERFORM idempotency_internal.change(CASE WHEN NOT is_new THEN 'subscribe' END, subscription, topics, handler, max_attempts,
		retry_delay, max_retry_delay, max_lag, dead_letter_retention, partitions, owner);
	RETURN is_new;
END
$$;
COMMENT ON FUNCTION idempotency.subscribe(text, text[], regprocedure, text, integer, interval, interval, interval, regrole, integer, interval) IS
	'create a subscription, or change the options that are named; true if it is new';

CREATE FUNCTION idempotency.alter_subscription(
	subscription text, topics text[] DEFAULT NULL, handler regprocedure DEFAULT NULL, max_attempts integer DEFAULT NULL,
	retry_delay interval DEFAULT NULL, max_retry_delay interval DEFAULT NULL, max_lag interval DEFAULT NULL,
	owner regrole DEFAULT NULL, partitions integer DEFAULT NULL, dead_letter_retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency_internal.locked_subscription('alter_subscription', subscription);
	RETURN idempotency_internal.change('alter_subscription', subscription, topics, handler, max_attempts,
		retry_delay, max_retry_delay, max_lag, dead_letter_retention, partitions, owner);
END
$$;
COMMENT ON FUNCTION idempotency.alter_subscription(text, text[], regprocedure, integer, interval, interval, interval, regrole, integer, interval) IS
	'change the options of a subscription that are named; true if one had another value';

CREATE FUNCTION idempotency.unsubscribe(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	locked idempotency.subscription;
	dead bigint;
BEGIN
	PERFORM idempotency_internal.check_name('subscription', subscription);
	-- an old snapshot does not show all
	PERFORM idempotency_internal.check_transaction('unsubscribe');
	IF NOT EXISTS (SELECT FROM idempotency.subscription AS s WHERE s.subscription = unsubscribe.subscription COLLATE "C") THEN
		RETURN false;
	END IF;
	locked := idempotency_internal.locked_subscription('unsubscribe', subscription);
	DELETE FROM idempotency.subscription AS s WHERE s.subscription = unsubscribe.subscription COLLATE "C";
	DELETE FROM idempotency.partition AS a WHERE a.subscription = unsubscribe.subscription COLLATE "C";
	DELETE FROM idempotency.position AS n WHERE n.subscription = unsubscribe.subscription COLLATE "C";
	DELETE FROM idempotency.parked AS k WHERE k.subscription = unsubscribe.subscription COLLATE "C";
	GET DIAGNOSTICS dead = ROW_COUNT;
	PERFORM idempotency_internal.log_call('unsubscribe',
		format('subscription "%s" of role "%s", with %s failed or waiting events', subscription, locked.owner, dead));
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency.unsubscribe(text) IS
	'delete a subscription and its parked events; true if there was one';

