-- extension only: the packed form of UUIDs
--
-- The type of stored keys. It packs canonical UUIDs only; SQL always sees the original
-- text.
--
\set SHOW_CONTEXT never
\set VERBOSITY terse

CREATE TEMPORARY TABLE sample (n int, key text);
INSERT INTO sample VALUES
	(1, '0190163d-8694-739b-aea5-966c26f8ad91'),
	(2, '00000000-0000-0000-0000-000000000000'),
	(3, 'ffffffff-ffff-ffff-ffff-ffffffffffff'),
	-- Text that resembles a UUID, but would not be restored to the same form, is not
	-- packed.
	(4, '0190163D-8694-739B-AEA5-966C26F8AD91'),
	(5, '0190163d8694739baea5966c26f8ad91'),
	(6, '0190163d-8694-739b-aea5-966c26f8ad9'),
	(7, '0190163d-8694-739b-aea5-966c26f8ad911'),
	(8, '0190163g-8694-739b-aea5-966c26f8ad91'),
	(9, '0190163d+8694-739b-aea5-966c26f8ad91'),
	(10, '0190163d-8694-739b-aea5-966c26f8ad9-'),
	(11, '{0190163d-8694-739b-aea5-966c26f8ad9'),
	(12, '-90163d0-8694-739b-aea5-966c26f8ad91'),
	-- Seventeen bytes, the length of a packed UUID.
	(13, 'seventeen bytes!!'),
	(14, 'k'),
	(15, repeat('k', 255));

-- Input equals output; and the stored size.
SELECT (idempotency.claim('keytext', key)).outcome, idempotency.complete('keytext', key, to_json(n)) FROM sample ORDER BY n;
SELECT n, left(k.key, 40) AS key, k.key::text = s.key AS same, pg_column_size(k.key) - 1 AS bytes
	FROM idempotency.key k JOIN sample s ON s.n = k.response::text::int WHERE scope = 'keytext' ORDER BY n;
WITH c AS (SELECT n, idempotency.claim('keytext', key) AS op FROM sample)
	SELECT count(*) AS replayed FROM c WHERE (op).replayed AND (op).response::text = n::text;

-- Keys that differ only in case are different keys.
SELECT count(DISTINCT key) FROM idempotency.keys WHERE scope = 'keytext' AND lower(key) = '0190163d-8694-739b-aea5-966c26f8ad91';

-- The order is bytewise: UUIDs first, in their own order.
SELECT left(key, 40) AS key FROM idempotency.keys WHERE scope = 'keytext' ORDER BY keys.key;
SELECT key FROM idempotency.keys WHERE scope = 'keytext' AND key < '0190163d-8694-739b-aea5-966c26f8ad91';
SELECT a::text, b::text, a < b AS lt, a <= b AS le, a = b AS eq, a <> b AS ne, a >= b AS ge, a > b AS gt
	FROM (VALUES ('b'::idempotency.keytext, 'a'::idempotency.keytext), ('a', 'a'), ('a', 'ab')) AS v (a, b);

-- The index finds one key under every search path, by literal and by parameter.
SET enable_seqscan = off;
SET enable_bitmapscan = off;
PREPARE find AS SELECT response_size FROM idempotency.keys WHERE scope = 'keytext' AND key = $1;
SET search_path = '';
EXPLAIN (COSTS OFF) EXECUTE find('0190163d-8694-739b-aea5-966c26f8ad91');
EXECUTE find('0190163d-8694-739b-aea5-966c26f8ad91');
RESET search_path;
RESET enable_seqscan;
RESET enable_bitmapscan;

-- A row that is inserted manually equals a row that a claim made.
BEGIN;
INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, response)
	SELECT now(), 'infinity', 200, 'moved', 'order-' || n, to_json(n) FROM generate_series(1, 3) AS n;
SELECT outcome, response FROM idempotency.claim('moved', 'order-2');
ROLLBACK;

-- The type accepts any text, so that a restore never fails; claims check keys.
SELECT n, v::idempotency.keytext::text = v AS same FROM (VALUES (1, ''), (2, E'a\tb'), (3, E'\u0085'), (4, repeat('k', 256))) AS t (n, v);
BEGIN;
INSERT INTO idempotency.key (created_at, expires_at, scope, key) VALUES (now(), 'infinity', 'moved', E'a\tb');
SELECT count(*) FROM idempotency.keys WHERE key = E'a\tb';
SELECT idempotency.claim('moved', E'a\tb');
\echo :SQLSTATE
ROLLBACK;
SELECT '0190163d-8694-739b-aea5-966c26f8ad91'::idempotency.keytext::text || '!' AS text;

-- By COPY, in text and binary format.
CREATE TEMPORARY TABLE copied (key idempotency.keytext);
\getenv abs_builddir PG_ABS_BUILDDIR
\set file :abs_builddir '/results/keytext.copy'
COPY (SELECT key FROM idempotency.key WHERE scope = 'keytext') TO :'file' WITH (FORMAT binary);
COPY copied FROM :'file' WITH (FORMAT binary);
SELECT count(*), count(*) FILTER (WHERE c.key = k.key) AS same FROM idempotency.key k LEFT JOIN copied c ON c.key = k.key WHERE scope = 'keytext';
COPY (SELECT key FROM idempotency.key WHERE scope = 'keytext' ORDER BY key LIMIT 4) TO stdout;

-- A user-defined index on the text is maintained too.
CREATE INDEX key_text ON idempotency.key ((key::text));
SELECT (idempotency.claim('keytext', 'indexed')).outcome, idempotency.complete('keytext', 'indexed');
DROP INDEX idempotency.key_text;

SELECT count(idempotency.forget('keytext', key)) FROM sample;
