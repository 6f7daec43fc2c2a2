--
-- fingerprint(): SHA-256 of a canonical document, and of a request
--
SET client_encoding = 'UTF8';

-- Of one document: equal to any RFC 8785 library followed by any SHA-256.
SELECT idempotency.fingerprint('{}');
SELECT idempotency.fingerprint('{"amount": 1999, "currency": "EUR"}');
SELECT idempotency.fingerprint('"é😂"') = sha256(convert_to('"é😂"', 'UTF8')) AS of_utf8;
SELECT idempotency.fingerprint(NULL) IS NULL AS strict;

-- The order of members, white space and the spelling of a value do not matter.
SELECT count(DISTINCT idempotency.fingerprint(document)), count(*)
FROM unnest(ARRAY['{"a": [1, 2.5], "b": {"c": "é", "d": null}}', '{"b":{"d":null,"c":"\u00e9"},"a":[1.0,25e-1]}',
	E'\n{ "b" : {\t"c":"\\u00E9", "d":null }, "a" : [ 10e-1,2.50 ] }\n',
	'{"a": 0, "b": 0, "a": [1, 2.5], "b": {"c": "é", "d": null}}']) AS document;
SELECT idempotency.fingerprint('{"a":[1.0,2.5]}'::json) = idempotency.fingerprint('{"a": [1, 2.50]}'::jsonb) AS json_and_jsonb;
SELECT count(DISTINCT idempotency.fingerprint(document))
FROM unnest(ARRAY['{"amount":1}', '{"amount":1.0}', '{"amount":10e-1}', '{"amount":0.1E+1}']) AS document;

-- The order of elements, the type and the twentieth digit matter.
SELECT count(DISTINCT idempotency.fingerprint(document)), count(*)
FROM unnest(ARRAY['[1,2]', '[2,1]', '[1,"2"]', '["1","2"]', '[[1,2]]', '[1,[2]]', '{"1":2}', 'null', '"null"', '[null]', '0', 'false',
	'""', '{}', '[]', '{"amount":12345678901234567.890}', '{"amount":12345678901234567.891}',
	'{"amount":10000000000000000000}', '{"amount":10000000000000000001}']) AS document;

-- All 720 permutations of six members.
WITH RECURSIVE member (name, text) AS (
	VALUES ('a', '"a":1'), ('b', '"b":[1,{"x":1}]'), ('c', '"c":null'), ('é', '"é":"é"'), ('', '"":true'), ('😂', '"😂":{}')
), permutation AS (
	SELECT ARRAY[name] AS names, text FROM member
	UNION ALL
	SELECT names || name, permutation.text || ',' || member.text FROM permutation JOIN member ON name <> ALL (names)
)
SELECT count(DISTINCT '{' || text || '}') AS permutations, count(DISTINCT idempotency.fingerprint('{' || text || '}')) AS fingerprints
FROM permutation WHERE cardinality(names) = 6;

-- A body of a hundred kilobytes, in TOAST.
CREATE TEMP TABLE body AS
SELECT ('{"items":[' || string_agg(format('{"n": %s, "id": "%s"}', i, md5(i::text)), ', ') || ']}')::json AS body FROM generate_series(1, 2100) AS i;
SELECT octet_length(body::text) > 100 * 1024 AS large,
	idempotency.fingerprint(body) = sha256(convert_to(idempotency.canonical(body), 'UTF8')) AS right,
	idempotency.fingerprint(body) = idempotency.fingerprint(body::jsonb) AS same,
	encode(idempotency.fingerprint(body), 'hex') AS fingerprint
FROM body;
SELECT idempotency.fingerprint(json_build_array(repeat('é', 600000))) = sha256(convert_to('["' || repeat('é', 600000) || '"]', 'UTF8')) AS right;

--
-- Of a request: method, path, body
--

-- Each text follows its length in four bytes; NULL has the length -1.
CREATE FUNCTION pg_temp.digest(VARIADIC parts text[]) RETURNS bytea LANGUAGE sql
RETURN sha256((SELECT string_agg(int4send(coalesce(octet_length(part), -1)) || coalesce(convert_to(part, 'UTF8'), ''), '' ORDER BY n)
	FROM unnest(parts) WITH ORDINALITY AS u (part, n)));

SELECT idempotency.fingerprint('POST', '/charges', '{"amount": 1.0}');
SELECT idempotency.fingerprint('POST', '/charges', '{"amount": 1.0}')
		= pg_temp.digest('idempotency request 1', 'POST', '/charges', '{"amount":1}') AS with_body,
	idempotency.fingerprint('DELETE', '/ä', NULL) = pg_temp.digest('idempotency request 1', 'DELETE', '/ä', NULL) AS without_body;

SELECT count(DISTINCT idempotency.fingerprint(method, path, body)), count(*)
FROM (VALUES ('POST', '/a', '1'), ('POST', '/', 'null'), ('POST', '/', NULL), ('POST', '/', '""'), ('PUT', '/', 'null'), ('post', '/', 'null'),
	('POST/', '', 'null'), ('', 'POST/', 'null'), ('PO', 'ST/', 'null'), ('POST', '/n', '"ull"'), ('POST', '', NULL), ('', '', NULL)) AS v (method, path, body);
SELECT count(DISTINCT idempotency.fingerprint('POST', '/', body))
FROM unnest(ARRAY['{"a":1,"b":2}', '{ "b": 2.0, "a": 1 }']) AS body;
SELECT idempotency.fingerprint(NULL, '/', '1') IS NULL AS no_method, idempotency.fingerprint('GET', NULL, '1') IS NULL AS no_path;
SELECT idempotency.fingerprint('POST', '/', '1') <> idempotency.fingerprint('1') AS not_that_of_the_body;

\set VERBOSITY sqlstate
SELECT idempotency.fingerprint('{"a":"\u0000"}');
SELECT idempotency.fingerprint('POST', '/', '{"a":"\u0000"}');
SELECT idempotency.fingerprint('POST', '/', 'x');
\set VERBOSITY default
