--
-- derive_key(), natural_key(), uuidv7()
--
SET client_encoding = 'UTF8';
\set SHOW_CONTEXT never

-- Each text follows its length in four bytes; NULL has the length -1.
CREATE FUNCTION pg_temp.digest(VARIADIC parts text[]) RETURNS bytea LANGUAGE sql
RETURN sha256((SELECT string_agg(int4send(coalesce(octet_length(part), -1)) || coalesce(convert_to(part, 'UTF8'), ''), '' ORDER BY n)
	FROM unnest(parts) WITH ORDINALITY AS u (part, n)));

--
-- derive_key(): the digest, with the version and the variant of a UUID.
--
CREATE FUNCTION pg_temp.uuid_of(digest bytea) RETURNS uuid LANGUAGE sql
RETURN encode(set_byte(set_byte(substr(digest, 1, 16), 6, get_byte(digest, 6) & 15 | 128), 8, get_byte(digest, 8) & 63 | 128), 'hex')::uuid;

SELECT idempotency.derive_key('charge.create', '8e03978e', 'capture');
SELECT idempotency.derive_key('a', 'ключ', 'é😂') = pg_temp.uuid_of(pg_temp.digest('idempotency derived key 1', 'a', 'ключ', 'é😂')) AS as_documented;

-- Version 8 and variant 10 for a thousand keys, all different.
SELECT count(DISTINCT derived), bool_and(derived::text ~ '^.{14}8.{4}[89ab].{16}$') AS marked
FROM (SELECT idempotency.derive_key('s', i::text, 'step') AS derived FROM generate_series(1, 1000) AS i) AS d;

-- The boundaries and the order of the parts matter.
SELECT count(DISTINCT idempotency.derive_key(a, b, c)), count(*)
FROM (VALUES ('a', 'b', 'c'), ('ab', 'c', 'x'), ('a', 'bc', 'x'), ('c', 'b', 'a'), ('a', 'b', 'cx'), ('A', 'b', 'c'), (' a', 'b', 'c')) AS v (a, b, c);

SELECT idempotency.derive_key(NULL, 'k', 's') IS NULL AS scope, idempotency.derive_key('s', NULL, 's') IS NULL AS key,
	idempotency.derive_key('s', 'k', NULL) IS NULL AS step;
SELECT idempotency.derive_key('', 'k', 's');
SELECT idempotency.derive_key('s', '', 's');
SELECT idempotency.derive_key('s', 'k', '');
-- The function is pure: it reads no setting, and accepts texts that a claim would
-- refuse.
BEGIN;
SELECT idempotency.derive_key('tenant2/charge', repeat('k', 300), E'a\tb') AS derived \gset
SET LOCAL idempotency.scope_prefix = 'tenant1/';
SELECT idempotency.derive_key('tenant2/charge', repeat('k', 300), E'a\tb') = :'derived' AS same;
ROLLBACK;

--
-- natural_key(): the digest in hexadecimal.
--
SELECT idempotency.natural_key('invoice', '2024', '17');
SELECT idempotency.natural_key('é', 'x', '') = encode(pg_temp.digest('idempotency natural key 1', 'é', 'x', ''), 'hex') AS as_documented;
SELECT idempotency.natural_key('a', 'b') = idempotency.natural_key(VARIADIC ARRAY['a', 'b']) AS variadic,
	idempotency.natural_key('a', 'b') = idempotency.natural_key(VARIADIC '[5:6]={a,b}'::text[]) AS any_bounds;

SELECT count(DISTINCT idempotency.natural_key(VARIADIC parts)), count(*), bool_and(idempotency.natural_key(VARIADIC parts) ~ '^[0-9a-f]{64}$') AS marked
FROM (VALUES (ARRAY['a', 'bc']), (ARRAY['ab', 'c']), (ARRAY['abc']), (ARRAY['a', 'b', 'c']), (ARRAY['bc', 'a']), (ARRAY['']),
	(ARRAY['NULL']), (ARRAY['null']), (ARRAY['', '']), (ARRAY['a', 'bc', '']),
	(ARRAY['a,bc']), (ARRAY['{a,bc}']), (ARRAY[repeat('a', 1000000)]), (ARRAY[repeat('a', 1000001)])) AS v (parts);

-- It differs from the other digests of the same texts.
SELECT left(idempotency.natural_key('a', 'b', 'c'), 12) <> left(replace(idempotency.derive_key('a', 'b', 'c')::text, '-', ''), 12) AS labelled;

SELECT idempotency.natural_key(VARIADIC NULL);
SELECT idempotency.natural_key(VARIADIC '{}');
-- A missing value would give all operations one key.
SELECT idempotency.natural_key('a', NULL);
SELECT idempotency.natural_key(VARIADIC ARRAY[['a', 'b'], ['c', 'd']]);

--
-- uuidv7(): ordered, although the clock often shows the same time for consecutive
-- calls.
--
CREATE TEMP TABLE made AS
SELECT i, id FROM (SELECT array_agg(idempotency.uuidv7()) AS ids FROM generate_series(1, 100000)) AS a, unnest(ids) WITH ORDINALITY AS u (id, i);
SELECT count(DISTINCT id), bool_and(id::text ~ '^.{14}7.{4}[89ab].{16}$') AS marked FROM made;
SELECT count(*) AS out_of_order FROM (SELECT id, lag(id) OVER (ORDER BY i) AS previous FROM made) AS m WHERE id <= previous;

-- The first 48 bits are the current time in milliseconds.
SELECT bool_and(abs(milliseconds - extract(epoch FROM clock_timestamp()) * 1000) < 3600000) AS now
FROM (SELECT ('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint AS milliseconds FROM made) AS m;

-- The 12 bits after the version vary, and so do the 62 random bits.
SELECT count(DISTINCT substr(id::text, 16, 3)) > 100 AS fractions, count(DISTINCT right(id::text, 16)) = 100000 AS random FROM made;

-- Each call returns a new value, also within one statement.
SELECT idempotency.uuidv7() < idempotency.uuidv7() AS ascending;
