-- ---------------------------------------------------------------------------
-- deliver: fetch, call the handler, acknowledge
-- ---------------------------------------------------------------------------

-- The stored handler, for the owner only: another role would run it with its own rights.
CREATE FUNCTION idempotency.handler_of(subscription text)
	RETURNS text
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.subscription_of(subscription);
BEGIN
	IF s.handler IS NULL THEN
		PERFORM idempotency_internal.raise('22023', format('subscription "%s" has no handler', subscription), NULL,
			'Pass a function as regprocedure, or store it with idempotency.alter_subscription().');
	ELSIF s.owner <> idempotency_internal.caller() THEN
		PERFORM idempotency_internal.raise('42501', format('only role "%s" can call the stored handler of subscription "%s"', s.owner, subscription),
			'The handler runs with the rights of the role that calls deliver().', 'Pass the handler, or call deliver() as that role.');
	END IF;
	PERFORM idempotency_internal.check_handler_owner(s.handler, s.owner);
	RETURN s.handler;
END
$$;
COMMENT ON FUNCTION idempotency.handler_of(text) IS 'the stored handler of a subscription, for its owner';

-- A key that one event has claimed opens no guarded table for the next one, and is not in the headers of what that publishes.
CREATE FUNCTION idempotency.end_event()
	RETURNS boolean
-- extension only
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_end_event';
-- portable only
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN set_config('idempotency_internal.results', '', true) IS NOT NULL;
-- both editions
COMMENT ON FUNCTION idempotency.end_event() IS
	'forget which keys this transaction has claimed, for require_claim(), current_key() and publish(); true';

-- Runs with the rights and the search path of its caller, because the handler does, and because
-- a procedure with COMMIT cannot do otherwise; so every name is qualified.
--
-- A transaction has the effects of some events and their acknowledgement: those of a batch, or of
-- 250 ms.  SET CONSTRAINTS checks what an event has deferred, also the commit guard, and then
-- gives those constraints back their mode that are deferred at first.
CREATE PROCEDURE idempotency.deliver(
	subscription text, handler regprocedure DEFAULT NULL, max_events integer DEFAULT 100, duration interval DEFAULT '1 minute',
	lease interval DEFAULT '1 minute', wait interval DEFAULT '0')
	LANGUAGE plpgsql
AS $$
DECLARE
	deadline pg_catalog.timestamptz := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) coalesce(duration, '1000 years');
	routine pg_catalog.record;
	reset pg_catalog.text;
	events idempotency.event[];
	event idempotency.event;
	done pg_catalog.int8[];
	number pg_catalog.int8;
	started_at pg_catalog.timestamptz;
	code pg_catalog.text;
	message pg_catalog.text;
	last pg_catalog.int4;
	acknowledged pg_catalog.int8;
	was_empty pg_catalog.bool := false;
	has_more pg_catalog.bool;
	is_late pg_catalog.bool;
BEGIN
	IF handler IS NULL THEN
		handler := idempotency.handler_of(subscription)::pg_catalog.regprocedure;
	END IF;
	SELECT n.nspname AS schema_name, p.proname AS function_name,
		p.prokind OPERATOR(pg_catalog.=) 'f' AND NOT p.proretset AND p.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.void'::pg_catalog.regtype::pg_catalog.oid
			AND p.pronargs OPERATOR(pg_catalog.=) 1 AND p.proargtypes[0] OPERATOR(pg_catalog.=) 'idempotency.event'::pg_catalog.regtype::pg_catalog.oid AS fits
	INTO routine
	FROM pg_catalog.pg_proc AS p
	JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
	WHERE p.oid OPERATOR(pg_catalog.=) handler::pg_catalog.oid;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = '42883', MESSAGE = pg_catalog.format('handler with OID %s does not exist', handler::pg_catalog.oid),
			HINT = 'Pass a function as regprocedure.';
	ELSIF NOT routine.fits THEN
		RAISE EXCEPTION USING ERRCODE = '42P13', MESSAGE = pg_catalog.format('function %s cannot handle events', handler),
			HINT = 'A handler takes one idempotency.event and returns void.';
	ELSIF NOT pg_catalog.has_function_privilege(handler::pg_catalog.oid, 'EXECUTE') THEN
		RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = pg_catalog.format('permission denied for function %s', routine.function_name);
	END IF;

	WHILE pg_catalog.clock_timestamp() OPERATOR(pg_catalog.<) deadline LOOP
		events := ARRAY(SELECT f FROM idempotency.fetch(subscription, max_events, lease => lease,
			wait => CASE WHEN was_empty AND wait IS NOT NULL
				THEN GREATEST('0', LEAST(wait, deadline OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp())) END) AS f);
		IF pg_catalog.cardinality(events) OPERATOR(pg_catalog.=) 0 THEN
			-- it has passed events of other topics, or found none
			has_more := idempotency.has_more(subscription);
			COMMIT;
			EXIT WHEN NOT has_more AND (was_empty OR (wait OPERATOR(pg_catalog.>) '0'::pg_catalog.interval) IS NOT TRUE);
			was_empty := NOT has_more;
			CONTINUE;
		END IF;
		COMMIT;
		was_empty := false;
		number := events[1].batch;
		done := '{}';
		last := pg_catalog.cardinality(events);
		started_at := pg_catalog.clock_timestamp();
		FOR i IN 1 .. last LOOP
			event := events[i];
			-- Each statement costs what it names.  So all are deferred, and those that are immediate at first are named,
			-- unless these are more, or some cannot be named: in a schema without USAGE, or with a name of one that is not
			-- deferrable.  If constraints with one name differ in their mode, each event has a transaction of its own.
			IF reset IS NULL THEN
				SELECT CASE WHEN pg_catalog.bool_or(c.is_mixed) IS NOT TRUE THEN coalesce(CASE
					WHEN pg_catalog.count(*) FILTER (WHERE c.is_deferred) OPERATOR(pg_catalog.>=) pg_catalog.count(*) FILTER (WHERE NOT c.is_deferred)
						AND pg_catalog.bool_and(c.is_deferred OR c.has_name) AND pg_catalog.bool_or(c.is_deferred)
					THEN pg_catalog.concat('SET CONSTRAINTS ALL DEFERRED',
						'; SET CONSTRAINTS ' OPERATOR(pg_catalog.||) pg_catalog.string_agg(c.name, ', ') FILTER (WHERE NOT c.is_deferred) OPERATOR(pg_catalog.||) ' IMMEDIATE')
					ELSE 'SET CONSTRAINTS ' OPERATOR(pg_catalog.||) pg_catalog.string_agg(c.name, ', ') FILTER (WHERE c.is_deferred AND c.has_name)
						OPERATOR(pg_catalog.||) ' DEFERRED'
				END, '') END INTO reset
				FROM (
					SELECT pg_catalog.format('%I.%I', n.nspname, o.conname) AS name, pg_catalog.bool_or(o.condeferred) AS is_deferred,
						pg_catalog.bool_or(o.condeferred) AND pg_catalog.bool_or(o.condeferrable AND NOT o.condeferred) AS is_mixed,
						pg_catalog.bool_and(o.condeferrable) AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS has_name
					FROM pg_catalog.pg_constraint AS o
					JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) o.connamespace
					-- those of a partition follow those of its parent
					WHERE NOT pg_catalog.pg_is_other_temp_schema(n.oid) AND o.conparentid OPERATOR(pg_catalog.=) 0::pg_catalog.oid
					GROUP BY n.oid, n.nspname, o.conname
					HAVING pg_catalog.bool_or(o.condeferrable)) AS c;
			END IF;
			code := NULL;
			BEGIN
				EXECUTE pg_catalog.format('SELECT %I.%I($1)', routine.schema_name, routine.function_name) USING event;
				SET CONSTRAINTS ALL IMMEDIATE;
				IF reset OPERATOR(pg_catalog.<>) '' THEN
					BEGIN
						EXECUTE reset;
					EXCEPTION
						WHEN undefined_object OR wrong_object_type OR invalid_schema_name THEN
							-- One has changed: look again, in the next transaction
							reset := NULL;
					END;
				END IF;
				IF reset IS NULL THEN
					started_at := 'epoch';
				END IF;
			EXCEPTION
				-- OTHERS is without these; a cancel must end the call
				WHEN OTHERS OR assert_failure THEN
					code := SQLSTATE;
					message := pg_catalog.concat(SQLSTATE, ': ', SQLERRM);
			END;
			is_late := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.>=) deadline;
			IF code IS NULL THEN
				done := done OPERATOR(pg_catalog.||) event.seq;
				PERFORM idempotency.end_event();
				CONTINUE WHEN i OPERATOR(pg_catalog.<) last AND NOT is_late
					AND pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) started_at OPERATOR(pg_catalog.<=) '250 ms'::pg_catalog.interval;
			ELSIF code OPERATOR(pg_catalog.=) ANY ('{IK410,IK412}') THEN
				-- the transaction cannot commit: what it handled goes back
				ROLLBACK;
				done := '{}';
			END IF;
			-- The handler can have acknowledged or failed an event itself: what it wrote for it must not commit.  The events
			-- handled before one that failed are acknowledged, because nack() takes out all that have its id.
			IF pg_catalog.cardinality(done) OPERATOR(pg_catalog.>) 0 THEN
				IF code IS NULL AND i OPERATOR(pg_catalog.=) last THEN
					acknowledged := idempotency.ack(subscription, number);
				ELSE
					acknowledged := idempotency.ack(subscription, number, done);
				END IF;
				IF acknowledged OPERATOR(pg_catalog.<>) pg_catalog.cardinality(done) THEN
					RAISE EXCEPTION USING ERRCODE = 'IK408', MESSAGE = 'an event left its batch while it was handled',
						HINT = 'Raise an error in the handler instead of calling idempotency.nack() or idempotency.ack().';
				END IF;
			END IF;
			IF code IS NOT NULL THEN
				PERFORM idempotency.nack(subscription, number, event.id, message, dead => code OPERATOR(pg_catalog.=) 'IKFIN');
			END IF;
			-- The next fetch() returns what is left behind an event that failed, or when the time is over
			IF code IS NOT NULL OR is_late AND i OPERATOR(pg_catalog.<) last THEN
				PERFORM idempotency.nack(subscription, number, NULL);
				COMMIT;
				EXIT;
			ELSIF i OPERATOR(pg_catalog.<) last THEN
				PERFORM idempotency.extend(subscription, number, lease);
			END IF;
			COMMIT;
			done := '{}';
			started_at := pg_catalog.clock_timestamp();
		END LOOP;
	END LOOP;
END
$$;
COMMENT ON PROCEDURE idempotency.deliver(text, regprocedure, integer, interval, interval, interval) IS
	'call a function for each event of a subscription until none is left, or the time is over';

