--
-- parse_header() and problem()
--
SET client_encoding = 'UTF8';
\set SHOW_CONTEXT never

--
-- parse_header(): a String of RFC 8941; parameters are checked and ignored.
--
SELECT header, idempotency.parse_header(header)
FROM unnest(ARRAY['"8e03978e-40d5-43dd-bc93-6894a57f9324"', '"a b"', '  "a"  ', '"a\"b\\c"', '"\\"', '"''/;,="', '" "', '"a";x', '"a";x=1',
	'"a"; x=-999999999999999;y=123456789012.123', '"a";a=?0;b=?1;*=*tok/en:1;k_-.*9="s\"";e=:aGVsbG8=:;f=::', '"a";   x',
	'"a";x;x', '"a";x="\\"']) AS header;
SELECT idempotency.parse_header('"' || string_agg(CASE WHEN chr(i) IN ('"', '\') THEN '\' ELSE '' END || chr(i), '' ORDER BY i) || '"')
	= string_agg(chr(i), '' ORDER BY i) AS all_of_ascii
FROM generate_series(32, 126) AS i;

-- Prints the reason why a header is refused.
CREATE FUNCTION pg_temp.refused(header text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	detail text;
BEGIN
	RETURN 'accepted: ' || idempotency.parse_header(header);
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
	RETURN concat_ws(' ', SQLSTATE, SQLERRM, '|', detail);
END
$$;

SELECT header, pg_temp.refused(header)
FROM unnest(ARRAY[NULL, '', '   ', '""', '  "";x', 'token', '8e03978e', '1', '?1', ':YQ==:', '''a''', '"a', '"', 'a"', '"a\', '"a\b"', '"a\\', '"a\"', '"é"', '"aé"', 'é',
	'"a"é', '"a" "b"', '"a", "b"', '"a";x=1, "b"', '"a",', ',', '("a" "b")', '"a"b', '"a" ;x', '"a";', '"a"; ', '"a";X', '"a";1', '"a";x =1', '"a";x=',
	'"a";x= 1', '"a";x=-', '"a";x=1.', '"a";x=.5', '"a";x=1.2345', '"a";x=1234567890123456', '"a";x=1234567890123.1', '"a";x=?2', '"a";x=?', '"a";x=:a',
	'"a";x=:a b:', '"a";x="b', '"a";x="é"', '"a";x=(1)', '"a";x=@1', '"a";x=1;', '"a";x=tok,en', '"a"; x;;y', '“a”']) AS header;

-- A byte sequence in a parameter is base64, with or without padding (RFC 8941, section
-- 4.2.7). Padding must be complete and at the end, and a last group of one character is
-- refused.
SELECT header, pg_temp.refused(header)
FROM unnest(ARRAY['"k"; p=:aGVsbG8=:', '"k"; p=:aGVsbG8:', '"k"; p=::', '"k"; p=:iZ==:', '"k"; p=:iZ:', '"k"; p=:+/+/:', '"k"; p=:YWJj:;q=::;r',
	'"k"; p=:=aGVsbG8=:', '"k"; p=:a=GVsbG8=:', '"k"; p=:aGVsbG8==:', '"k"; p=:iZ=:', '"k"; p=:iZ===:', '"k"; p=:YWJj=:', '"k"; p=:YWJj====:', '"k"; p=:=:',
	'"k"; p=:====:', '"k"; p=:Y:', '"k"; p=:YWJjY:', '"k"; p=:YWJjY===:', '"k"; p=:aGVsbG8=.:', '"k"; p=:aGVsbG8=a:', '"k"; p=:aGVsb G8=:', '"k"; p=:_-Ah:',
	'"k"; p=:aGVsbG8=', '"k"; p=:', '"k"; p=:é:', '"k"; p=:aGVsbG8=:x', '"k"; p=:aGVsbG8=: ;q', '"k"; p=::=']) AS header;

-- Control characters, including DEL, are refused, and a tab is not a space.
SELECT i, pg_temp.refused('"a' || chr(i) || '"') FROM unnest(ARRAY[1, 9, 10, 13, 31, 127, 128]) AS i;
SELECT pg_temp.refused(E'\t"a"'), pg_temp.refused(E'"a"\t'), pg_temp.refused(E'"a"\r\n');

-- A key can have 255 characters. The limit counts the key, not the header.
SELECT length(idempotency.parse_header('"' || repeat('x', 255) || '"')), length(idempotency.parse_header('"' || repeat('\\', 255) || '"')),
	pg_temp.refused('"' || repeat('x', 256) || '"');
SELECT length(idempotency.parse_header('"a";x="' || repeat('y', 1000) || '"'));

-- With hints.
SELECT idempotency.parse_header('8e03978e-40d5-43dd-bc93-6894a57f9324');
SELECT idempotency.parse_header(NULL);
SELECT idempotency.parse_header('"' || repeat('x', 300) || '"');

--
-- problem(): RFC 9457 for the outcomes that are errors.
--
SELECT outcome, idempotency.problem(ROW(outcome, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, NULL, NULL, NULL)::idempotency.operation) AS problem
FROM unnest(enum_range(NULL::idempotency.outcome) || NULL) AS outcome;
SELECT outcome, problem ->> 'type' AS type, problem ->> 'title' AS title, problem -> 'status' AS status, problem ->> 'detail' AS detail
FROM unnest(ARRAY['in_progress', 'mismatched']) AS outcome
CROSS JOIN LATERAL idempotency.problem(ROW(outcome, false, 7, 2, 'charged', '{"a":1}', 201, '{}', '{"id":1}', false, 30, now(), '\x00')::idempotency.operation) AS problem;
SELECT idempotency.problem(NULL) IS NULL AS strict;

-- A stored failure is the handler's own response, and replayed unchanged.
SELECT idempotency.problem(ROW('replayed', true, NULL, NULL, NULL, NULL, 422, NULL, '{"title":"declined"}', true, NULL, now(), NULL)::idempotency.operation) IS NULL AS none;

-- Of a real operation: the same key twice in one transaction.
BEGIN;
SELECT outcome FROM idempotency.try_claim('http', 'twice');
SELECT idempotency.problem(idempotency.try_claim('http', 'twice'));
ROLLBACK;

-- extension only: types of the library
-- The type belongs to the extension.
BEGIN;
ALTER TYPE idempotency.operation ALTER ATTRIBUTE outcome TYPE bigint;
SELECT idempotency.problem(ROW(42, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, NULL, NULL, NULL)::idempotency.operation);
ROLLBACK;
-- both editions

--
-- problem_headers(), and the link to the documentation
--
CREATE FUNCTION pg_temp.operation(outcome text, retry_after integer DEFAULT NULL) RETURNS idempotency.operation LANGUAGE sql AS
	$$ SELECT jsonb_populate_record(NULL::idempotency.operation, jsonb_build_object('outcome', outcome, 'retry_after', retry_after)) $$;

-- Without a link, and for the SQLSTATEs that the draft has an answer for.
SELECT sqlstate, idempotency.problem(sqlstate), idempotency.problem_headers(sqlstate)
	FROM unnest('{IK400,IK409,IK422,IK410,IK428,40001,ik400,"IK400 ","",NULL}'::text[]) AS sqlstate;
SELECT outcome, idempotency.problem_headers(pg_temp.operation(outcome)) FROM unnest(enum_range(NULL::idempotency.outcome)::text[] || NULL) AS outcome;
-- Retry-After is retry_after, and 1 where nothing runs.
SELECT retry_after, idempotency.problem_headers(pg_temp.operation('in_progress', retry_after)) ->> 'Retry-After' AS seconds
	FROM unnest('{0,1,2,30,86400,-1,2147483647,NULL}'::integer[]) AS retry_after;

-- With a link: the same in the type and in the header.
SET idempotency.documentation = 'https://developer.example.com/idempotency?a=1&b=(2)#keys';
SELECT idempotency.problem(v.sqlstate), idempotency.problem_headers(v.sqlstate) FROM (VALUES ('IK400'), ('IK409'), ('IK422'), ('42P01')) AS v (sqlstate);
SELECT op.outcome, problem ->> 'type' AS type, problem ->> 'title' AS title, h ->> 'Link' AS link, h ->> 'Retry-After' AS retry_after
	FROM unnest('{in_progress,mismatched}'::text[]) AS o, pg_temp.operation(o, 3) AS op,
		idempotency.problem(op) AS problem, idempotency.problem_headers(op) AS h;
-- The failure of a handler has a type of its own, or about:blank.
CREATE FUNCTION http_declined(json) RETURNS json LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'declined' USING ERRCODE = 'IKFIN'; END $$;
SELECT status, response FROM idempotency.run('http', 'declined', NULL, 'http_declined(json)');
DROP FUNCTION http_declined;
DELETE FROM idempotency.key WHERE scope = 'http';

-- A procedure answers an error with its SQLSTATE.
CREATE FUNCTION pg_temp.answer(scope text, key text, request json) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	IF (idempotency.claim(scope, key, request)).replayed THEN
		RETURN 'replayed';
	END IF;
	PERFORM idempotency.complete(scope, key);
	RETURN 'done';
EXCEPTION WHEN SQLSTATE 'IK400' OR SQLSTATE 'IK409' OR SQLSTATE 'IK422' THEN
	RETURN (idempotency.problem(SQLSTATE) ->> 'title') || ', ' || (idempotency.problem_headers(SQLSTATE) ->> 'Link');
END $$;
SELECT pg_temp.answer('http', NULL, '1'), pg_temp.answer('http', 'k', '1'), pg_temp.answer('http', 'k', '1'), pg_temp.answer('http', 'k', '2');
DELETE FROM idempotency.key WHERE scope = 'http';

-- A role, a database and a function can set it; any URI reference is valid.
CREATE FUNCTION pg_temp.link() RETURNS text LANGUAGE sql SET idempotency.documentation = '/docs/keys' AS
	$$ SELECT idempotency.problem_headers('IK422') ->> 'Link' $$;
SELECT pg_temp.link(), idempotency.problem_headers('IK422') ->> 'Link' AS outside;
SELECT value, set_config('idempotency.documentation', value, false) = value AS accepted, idempotency.problem('IK400') ->> 'type' AS type
	FROM unnest(ARRAY['https://example.com', 'HTTP://[::1]:8080/a;b=c,d?e#f', '//example.com/a', '../a', 'a/b:c', '?q', '#keys', 'urn:example:idempotency',
		'tag:example.com,2026:keys', '/%E2%9C%93', '~a!$&''()*+,;=@', '']) AS value;
SELECT length(set_config('idempotency.documentation', rpad('/', 2000, 'a'), false));

-- extension only: settings that the library defines
-- Nothing that could end the header or the brackets around the link is valid.
CREATE FUNCTION pg_temp.link_refused(value text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM set_config('idempotency.documentation', value, false);
	RETURN 'accepted';
EXCEPTION WHEN invalid_parameter_value THEN
	RETURN sqlstate;
END $$;
SELECT quote_literal(left(value, 40)) AS value, pg_temp.link_refused(value) FROM unnest(ARRAY['https://example.com/>; rel="x"', 'https://example.com/<a', 'https://example.com/"',
	E'https://example.com/\r\nSet-Cookie: a=b', E'https://example.com/\n', E'\thttps://example.com', 'https://example.com/a b', ' ', 'https://example.com/\', 'https://example.com/{a}',
	'https://example.com/|', 'https://example.com/^', 'https://example.com/`', U&'https://example.com/\00e9', E'https://example.com/\u0085', E'a\x7f', '/%', '/%1', '/%GG', '/%0', ':a',
	'1http://example.com', 'ht tp://a', 'ht_tp:a', 'é:a', '#a#b', rpad('/', 2001, 'a')]) AS value;
SELECT count(*) AS accepted, string_agg(chr(i), '' ORDER BY i) AS characters FROM generate_series(1, 255) AS i
	WHERE pg_temp.link_refused('/a' || chr(i) || '0') = 'accepted';
\set VERBOSITY default
SET idempotency.documentation = '<a>';
RESET idempotency.documentation;
-- both editions
