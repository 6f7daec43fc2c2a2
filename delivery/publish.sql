-- ---------------------------------------------------------------------------
-- Publishing (the extension has a function in C instead)
-- ---------------------------------------------------------------------------

-- The headers of an event: those of the caller, with scope and key of the claim that this
-- transaction was granted last, in any scope whose latest call it was.  Text is joined, so that the
-- caller's bytes stay as they are.
CREATE FUNCTION idempotency_internal.event_headers(given json)
	RETURNS json
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	last text := (
		SELECT e.entry FROM unnest(string_to_array(idempotency_internal.results(), chr(30))) WITH ORDINALITY AS e (entry, n)
		WHERE left(split_part(e.entry, chr(31), 2), 1) = 'k' ORDER BY e.n LIMIT 1);
	scope text := split_part(last, chr(31), 1);
	key text := substr(split_part(last, chr(31), 2), 2);
	members text;
BEGIN
	IF json_typeof(given) <> 'object' THEN
		PERFORM idempotency_internal.raise('22023', 'headers must be a JSON object', NULL,
			'Pass names and values, such as ''{"trace": "a1"}''.');
	ELSIF last IS NULL OR NOT idempotency_internal.is_granted(scope, 'k', key) THEN
		RETURN given;
	END IF;
	members := concat_ws(',',
		CASE WHEN given -> 'idempotency-scope' IS NULL THEN '"idempotency-scope":' || to_json(scope) END,
		CASE WHEN given -> 'idempotency-key' IS NULL THEN '"idempotency-key":' || to_json(key) END,
		nullif(regexp_replace(given::text, E'^[ \\t\\r\\n]*\\{[ \\t\\r\\n]*|[ \\t\\r\\n]*\\}[ \\t\\r\\n]*$', '', 'g'), ''));
	RETURN '{' || members || '}';
END
$$;
COMMENT ON FUNCTION idempotency_internal.event_headers(json) IS 'the headers of an event that is published now';

-- The transaction has its id before the number is drawn, and the INSERT locks the table
-- before that, too: see scan.sql.
CREATE FUNCTION idempotency.publish(
	topic text, payload text, aggregate_id text DEFAULT NULL, type text DEFAULT NULL,
	headers text DEFAULT NULL, event_id uuid DEFAULT NULL, deliver_at timestamptz DEFAULT NULL)
	RETURNS uuid
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	now timestamptz := clock_timestamp();
	document json := payload;
	given json := headers;
	bytes integer := coalesce(octet_length(payload), 0);
	microseconds bigint;
	me xid8;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('publish');
	END IF;
	IF (topic <> '' AND length(topic) <= 255 AND (aggregate_id <> '' AND length(aggregate_id) <= 255) IS NOT FALSE
		AND (type <> '' AND length(type) <= 255) IS NOT FALSE
		AND concat(topic, aggregate_id, type) !~ E'[\\u0001-\\u001F\\u007F-\\u009F{[]' COLLATE "C") IS NOT TRUE
	THEN
		PERFORM idempotency_internal.check_name('topic', topic);
		PERFORM idempotency_internal.check_name('aggregate', aggregate_id) WHERE aggregate_id IS NOT NULL;
		PERFORM idempotency_internal.check_name('type', type) WHERE type IS NOT NULL;
	END IF;
	IF given IS NOT NULL OR idempotency_internal.results() <> '' THEN
		given := idempotency_internal.event_headers(given);
		bytes := bytes + coalesce(octet_length(given::text), 0);
	END IF;
	-- the least limit, and the default one
	IF bytes > 1024 AND (bytes > 1048576 OR idempotency_internal.setting('max_payload_size') <> '')
		AND bytes > idempotency_internal.size_setting('max_payload_size', idempotency_internal.setting('max_payload_size')) THEN
		PERFORM idempotency_internal.raise('54000',
			format('event of %s bytes exceeds idempotency.max_payload_size (%s bytes)', bytes,
				idempotency_internal.size_setting('max_payload_size', idempotency_internal.setting('max_payload_size'))),
			format('Topic "%s".', topic), 'Publish a reference to the large part, or raise the limit with idempotency.configure().');
	END IF;
	-- A UUID of version 7, as of uuidv7()
	IF event_id IS NULL THEN
		microseconds := date_part('epoch', now) * 1000000;
		event_id := encode(overlay(uuid_send(gen_random_uuid())
			PLACING substr(int8send(microseconds / 1000), 3) || int2send((28672 + (microseconds % 1000 << 12) / 1000)::smallint) FROM 1), 'hex');
	END IF;
	me := pg_current_xact_id();
	INSERT INTO idempotency.outbox (seq, txid, published_at, id, bucket, bytes, deliver_at, aggregatetype, aggregateid, type, payload, headers)
	VALUES (nextval('idempotency.outbox_seq'), me, now, event_id,
		hashtext(coalesce(aggregate_id, event_id::text) COLLATE "C") & 2147483647, bytes, publish.deliver_at, topic, aggregate_id, publish.type, document, given);
	RETURN event_id;
END
$$;
COMMENT ON FUNCTION idempotency.publish(text, text, text, text, text, uuid, timestamptz) IS
	'publish an event when this transaction commits; returns the event''s id';

-- Payload and headers can be json or jsonb, and an aggregate can be named by uuid or bigint: one
-- more form for each, so that no value of a client's own type comes here.
DO $$
DECLARE
	form record;
BEGIN
	FOR form IN
		SELECT d.type AS document, a.type AS aggregate
		FROM unnest('{text,json,jsonb}'::text[]) AS d (type), unnest('{text,uuid,bigint}'::text[]) AS a (type)
		WHERE d.type <> 'text' OR a.type <> 'text'
	LOOP
		EXECUTE format('CREATE FUNCTION idempotency.publish(topic text, payload %1$s, aggregate_id %2$s%3$s, type text DEFAULT NULL, '
			'headers %1$s DEFAULT NULL, event_id uuid DEFAULT NULL, deliver_at timestamptz DEFAULT NULL) RETURNS uuid '
			'LANGUAGE sql VOLATILE PARALLEL UNSAFE AS %4$L',
			form.document, form.aggregate, CASE form.aggregate WHEN 'text' THEN ' DEFAULT NULL' ELSE '' END,
			'SELECT idempotency.publish($1, $2::pg_catalog.text, $3::pg_catalog.text, $4, $5::pg_catalog.text, $6, $7)');
		EXECUTE format('COMMENT ON FUNCTION idempotency.publish(text, %1$s, %2$s, text, %1$s, uuid, timestamptz) IS %3$L', form.document, form.aggregate,
			'publish an event when this transaction commits; returns the event''s id');
	END LOOP;
END
$$;

