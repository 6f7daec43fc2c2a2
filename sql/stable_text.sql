--
-- stable_text(): the text of a value, whatever the settings of the session
--
CREATE TYPE purchase AS (at timestamptz, amount float8);
CREATE DOMAIN moment AS timestamptz;
SET timezone = 'UTC';
SET datestyle = 'ISO, YMD';
SET intervalstyle = 'postgres';
CREATE TABLE sample AS SELECT
	timestamptz '2026-02-01 23:30:00.5+00' AS at,
	timestamp '2026-02-01 23:30:00' AS local_time,
	date '2026-02-01' AS day,
	interval '1 day 2 hours' AS length,
	'\x0001ff'::bytea AS bytes,
	0.1::float8 + 0.2::float8 AS ratio,
	12.34::numeric::money AS price,
	tstzrange('2026-02-01', '2026-03-01') AS span,
	ARRAY['2026-02-01 12:00+00'::moment] AS moments,
	ROW('2026-02-01 12:00+00', 0.1::float8 + 0.2::float8)::purchase AS purchase,
	'purchase'::regtype AS type,
	true AS flag,
	'a'::char(4) AS code,
	25.50 AS amount;

-- One text for each value; that of a row, and of a record, too.
SELECT column_name, text FROM sample AS s, LATERAL (VALUES
	('at', idempotency.stable_text(at)), ('local_time', idempotency.stable_text(local_time)), ('day', idempotency.stable_text(day)),
	('length', idempotency.stable_text(length)), ('bytes', idempotency.stable_text(bytes)), ('ratio', idempotency.stable_text(ratio)),
	('price', idempotency.stable_text(price)), ('span', idempotency.stable_text(span)), ('moments', idempotency.stable_text(moments)),
	('purchase', idempotency.stable_text(purchase)), ('type', idempotency.stable_text(type)), ('flag', idempotency.stable_text(flag)),
	('code', idempotency.stable_text(code)), ('amount', idempotency.stable_text(amount)), ('the row', idempotency.stable_text(s)),
	('a record', idempotency.stable_text(ROW(at, day, 'a'::text)))) AS v (column_name, text);
SELECT idempotency.stable_text(NULL::date) IS NULL AS strict;
SELECT idempotency.stable_text('a literal');

-- Under other settings, the fingerprint of a request and the key of an operation are the same; by
-- a cast, they are others.
CREATE TABLE observed (request bytea, key text, at bytea, length bytea, bytes bytea, ratio bytea, day text, type text);
CREATE FUNCTION pg_temp.observe(timezone text, datestyle text, intervalstyle text, bytea_output text, digits text, path text) RETURNS void
LANGUAGE sql AS $$
	SELECT set_config('timezone', $1, true), set_config('datestyle', $2, true), set_config('intervalstyle', $3, true),
		set_config('bytea_output', $4, true), set_config('extra_float_digits', $5, true), set_config('search_path', $6, true);
	INSERT INTO public.observed SELECT
		idempotency.fingerprint(jsonb_build_object('at', idempotency.stable_text(s.at), 'length', idempotency.stable_text(s.length),
			'bytes', idempotency.stable_text(s.bytes), 'ratio', idempotency.stable_text(s.ratio), 'all', idempotency.stable_text(s))),
		idempotency.natural_key('report', idempotency.stable_text(s.day), idempotency.stable_text(s.local_time), idempotency.stable_text(s.span),
			idempotency.stable_text(s.moments), idempotency.stable_text(s.type)),
		idempotency.fingerprint(jsonb_build_object('at', s.at)), idempotency.fingerprint(jsonb_build_object('length', s.length)),
		idempotency.fingerprint(jsonb_build_object('bytes', s.bytes)), idempotency.fingerprint(jsonb_build_object('ratio', s.ratio)),
		idempotency.natural_key(s.day::text), idempotency.natural_key(s.type::text)
	FROM public.sample AS s
$$;
SELECT pg_temp.observe('UTC', 'ISO, YMD', 'postgres', 'hex', '1', 'public');
SELECT pg_temp.observe('Europe/Berlin', 'ISO, YMD', 'postgres', 'hex', '1', 'public');
SELECT pg_temp.observe('UTC', 'German, DMY', 'postgres', 'hex', '1', 'public');
SELECT pg_temp.observe('UTC', 'ISO, YMD', 'iso_8601', 'hex', '1', 'public');
SELECT pg_temp.observe('UTC', 'ISO, YMD', 'postgres', 'escape', '1', 'public');
SELECT pg_temp.observe('UTC', 'ISO, YMD', 'postgres', 'hex', '-3', 'public');
SELECT pg_temp.observe('UTC', 'ISO, YMD', 'postgres', 'hex', '1', 'pg_catalog');
SELECT count(*), count(DISTINCT request) AS requests, count(DISTINCT key) AS keys, count(DISTINCT at) AS at, count(DISTINCT length) AS length,
	count(DISTINCT bytes) AS bytes, count(DISTINCT ratio) AS ratio, count(DISTINCT day) AS day, count(DISTINCT type) AS type
FROM public.observed;

-- A retry of another session replays.
BEGIN;
SELECT (idempotency.claim('stable', 'order-1', jsonb_build_object('at', idempotency.stable_text(at)))).outcome FROM sample;
SELECT idempotency.complete('stable', 'order-1', '1');
COMMIT;
SET timezone = 'Asia/Tokyo';
SET datestyle = 'SQL, MDY';
SELECT (idempotency.claim('stable', 'order-1', jsonb_build_object('at', idempotency.stable_text(at)))).outcome FROM sample;
SELECT (idempotency.try_claim('stable', 'order-1', jsonb_build_object('at', at))).outcome FROM sample;

DROP TABLE sample, observed;
DROP DOMAIN moment;
DROP TYPE purchase;
