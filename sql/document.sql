-- The type idempotency.document: JSON text stays as it is, and a jsonb value is kept as
-- one, until it is stored or returned.

\set VERBOSITY terse

CREATE TABLE sample (id int GENERATED ALWAYS AS IDENTITY, value jsonb);
INSERT INTO sample (value) VALUES
	('null'), ('true'), ('25.00'), ('12345678901234567890.5'), ('""'), ('"a\tb\u00e9"'), ('[]'), ('{}'),
	('[1, [2, {"b": null, "a": [false]}], "x"]'), ('{"b": 1, "a": {"d": [1.50, "2"], "c": {}}}');
INSERT INTO sample (value) SELECT jsonb_build_object('text', repeat(md5('a'), 500), 'list', (SELECT jsonb_agg(i) FROM generate_series(1, 3000) AS i));

-- Every form of a value has the same text, canonical form and fingerprint.
SELECT id, left(value::idempotency.document::json::text, 60) AS json,
	value::idempotency.document::json::text = value::text AS same_text,
	value::idempotency.document::jsonb = value AS same_value,
	idempotency.canonical(value) = idempotency.canonical(value::text) AS canonical,
	idempotency.fingerprint(value) = idempotency.fingerprint(value::json) AS fingerprint,
	idempotency.fingerprint('PUT', '/x', value) = idempotency.fingerprint('PUT', '/x', value::text) AS request
	FROM sample ORDER BY id;
-- JSON text keeps its bytes, even where jsonb would not.
SELECT d::json AS json, idempotency.canonical(d) AS canonical
	FROM (VALUES (' {"a":1.0,  "a":2} '::json::idempotency.document), ('[1 ,2]'::text::idempotency.document)) AS v(d);

-- Stored in a table: in a short and in a compressed form.
CREATE TABLE stored AS SELECT id, value::idempotency.document AS document FROM sample;
INSERT INTO stored SELECT id, value::json::idempotency.document FROM sample;
SELECT count(*), bool_and(document::jsonb = value AND idempotency.fingerprint(document) = idempotency.fingerprint(value)) AS same
	FROM stored JOIN sample USING (id);
-- The server's JSON functions free what the cast to json returns.
SELECT array_to_json(array_agg(document))::jsonb = jsonb_agg(value) AS array, json_agg(document)::jsonb = jsonb_agg(value) AS list,
	bool_and((to_json(stored) -> 'document')::jsonb = value) AS row
	FROM stored JOIN sample USING (id);
SELECT document FROM stored WHERE id = 9;
-- extension only: a base type
SELECT convert_from(idempotency_internal.document_send(document), 'UTF8') FROM stored WHERE id = 10;
-- both editions

-- A request as jsonb matches the same request as text, and the other way round.
CREATE FUNCTION pg_temp.answer(request idempotency.document) RETURNS idempotency.document LANGUAGE sql
	AS $$ SELECT jsonb_build_object('got', request::jsonb) $$;
SELECT (idempotency.run('document', 'jsonb', '{"b": [1, 2], "a": "x"}'::jsonb, 'pg_temp.answer(idempotency.document)')).response;
SELECT outcome, response FROM idempotency.claim('document', 'jsonb', '{ "a": "x", "b": [1, 2] }');
SELECT outcome FROM idempotency.try_claim('document', 'jsonb', '{"a": "x", "b": [1, 3]}'::jsonb);

-- What is stored is text: of an outcome, a request, a state, an event.
BEGIN;
SELECT outcome FROM idempotency.claim('document', 'stored', '{"amount":  100}'::jsonb);
SELECT idempotency.complete('document', 'stored', '{"id":  1}'::jsonb, 201, '{"Location":  "/1"}'::jsonb);
SELECT outcome FROM idempotency.claim('document', 'failed');
SELECT idempotency.fail('document', 'failed', '["no"]'::jsonb, 402);
COMMIT;
SELECT status, response, headers FROM idempotency.peek('document', 'stored');
SELECT status, response, failed FROM idempotency.peek('document', 'failed');
SELECT token AS lease FROM idempotency.claim('document', 'leased', '{"amount":  100}'::jsonb, lease => '1 hour') \gset
SELECT FROM idempotency.checkpoint('document', 'leased', :lease, 'sent', '{"at":  1}'::jsonb);
SELECT idempotency.release('document', 'leased', :lease);
SELECT request, state, recovery_point FROM idempotency.claim_abandoned('document', '1 hour');
-- extension only: the outbox
SELECT idempotency.publish('document', '{"a":  1}'::jsonb, headers => '{"h":  1}'::jsonb) AS event \gset
SELECT payload, headers FROM idempotency.outbox WHERE id = :'event';
-- both editions
-- The limit is on the text.
SET idempotency.max_response_size = '1kB';
SELECT outcome FROM idempotency.claim('document', 'large', jsonb_build_array(repeat('a', 1022)), lease => '1 s');
RESET idempotency.max_response_size;

DROP TABLE sample, stored;
-- extension only: the outbox
DELETE FROM idempotency.outbox;
-- both editions
SELECT count(idempotency.forget(scope, key)) > 0 AS forgotten FROM idempotency.keys WHERE scope = 'document';
