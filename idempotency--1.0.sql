/* idempotency--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The control file says schema = pg_catalog, so that this schema is ours to
-- make: one made beforehand by somebody else aborts the installation here.
CREATE SCHEMA idempotency;
COMMENT ON SCHEMA idempotency IS 'idempotency keys: retries have their effect exactly once';

-- ---------------------------------------------------------------------------
-- Types
-- ---------------------------------------------------------------------------

-- The one input type for JSON: json with json's own I/O, and implicit casts
-- from whatever a caller has at hand.  (Overloads for json, jsonb and text
-- would make an untyped literal ambiguous.)
CREATE TYPE idempotency.document;

CREATE FUNCTION idempotency.document_in(cstring) RETURNS idempotency.document
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'json_in';
CREATE FUNCTION idempotency.document_out(idempotency.document) RETURNS cstring
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'json_out';
CREATE FUNCTION idempotency.document_recv(internal) RETURNS idempotency.document
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'json_recv';
CREATE FUNCTION idempotency.document_send(idempotency.document) RETURNS bytea
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'json_send';
COMMENT ON FUNCTION idempotency.document_in(cstring) IS 'I/O';
COMMENT ON FUNCTION idempotency.document_out(idempotency.document) IS 'I/O';
COMMENT ON FUNCTION idempotency.document_recv(internal) IS 'I/O';
COMMENT ON FUNCTION idempotency.document_send(idempotency.document) IS 'I/O';

CREATE TYPE idempotency.document (
	INPUT = idempotency.document_in,
	OUTPUT = idempotency.document_out,
	RECEIVE = idempotency.document_recv,
	SEND = idempotency.document_send,
	LIKE = pg_catalog.json
);
COMMENT ON TYPE idempotency.document IS 'a JSON argument: json, jsonb, text or an untyped literal';

CREATE FUNCTION idempotency.document(pg_catalog.jsonb) RETURNS idempotency.document
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_from_jsonb';
COMMENT ON FUNCTION idempotency.document(pg_catalog.jsonb) IS 'cast';

CREATE CAST (pg_catalog.json AS idempotency.document) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (pg_catalog.jsonb AS idempotency.document) WITH FUNCTION idempotency.document(pg_catalog.jsonb) AS IMPLICIT;
CREATE CAST (pg_catalog.text AS idempotency.document) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.varchar AS idempotency.document) WITH INOUT AS IMPLICIT;
CREATE CAST (idempotency.document AS pg_catalog.json) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (idempotency.document AS pg_catalog.jsonb) WITH INOUT AS IMPLICIT;
COMMENT ON CAST (pg_catalog.json AS idempotency.document) IS 'the same bytes';
COMMENT ON CAST (pg_catalog.jsonb AS idempotency.document) IS 'the text of the value';
COMMENT ON CAST (pg_catalog.text AS idempotency.document) IS 'the text, if it is JSON';
COMMENT ON CAST (pg_catalog.varchar AS idempotency.document) IS 'the text, if it is JSON';
COMMENT ON CAST (idempotency.document AS pg_catalog.json) IS 'the same bytes';
COMMENT ON CAST (idempotency.document AS pg_catalog.jsonb) IS 'the value';

-- What every call about one operation answers.
CREATE TYPE idempotency.operation AS (
	outcome text,
	replayed boolean,
	status integer,
	headers json,
	response json,
	failed boolean,
	expires_at timestamptz
);
COMMENT ON TYPE idempotency.operation IS 'the outcome of a claim, and the stored answer if there is one';
COMMENT ON COLUMN idempotency.operation.outcome IS 'claimed, replayed, in_progress or mismatched';
COMMENT ON COLUMN idempotency.operation.replayed IS 'true: return the stored answer, do nothing';
COMMENT ON COLUMN idempotency.operation.status IS 'stored status, an HTTP status by convention';
COMMENT ON COLUMN idempotency.operation.headers IS 'stored headers, byte for byte';
COMMENT ON COLUMN idempotency.operation.response IS 'stored response, byte for byte';
COMMENT ON COLUMN idempotency.operation.failed IS 'true: the stored answer is a final failure';
COMMENT ON COLUMN idempotency.operation.expires_at IS 'until when the stored answer is remembered';

-- ---------------------------------------------------------------------------
-- Helpers: pure functions of their arguments
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.canonical(document idempotency.document)
	RETURNS text
	LANGUAGE C IMMUTABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_canonical';
COMMENT ON FUNCTION idempotency.canonical(idempotency.document) IS
	'the canonical text of a JSON value (RFC 8785, but with exact numbers)';

CREATE FUNCTION idempotency.fingerprint(document idempotency.document)
	RETURNS bytea
	LANGUAGE C IMMUTABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_fingerprint';
COMMENT ON FUNCTION idempotency.fingerprint(idempotency.document) IS
	'SHA-256 of the canonical text of a JSON value, in UTF-8';

-- Not STRICT: a request may have no body.
CREATE FUNCTION idempotency.fingerprint(method text, path text, body idempotency.document)
	RETURNS bytea
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_fingerprint_request';
COMMENT ON FUNCTION idempotency.fingerprint(text, text, idempotency.document) IS
	'SHA-256 of a request: its method, its path and its canonical body';

CREATE FUNCTION idempotency.derive_key(scope text, key text, step text)
	RETURNS uuid
	LANGUAGE C IMMUTABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_derive_key';
COMMENT ON FUNCTION idempotency.derive_key(text, text, text) IS
	'the key of one step of an operation, to hand to the next service';

-- Not STRICT: no parts at all are an error, and so is a missing header.
CREATE FUNCTION idempotency.natural_key(VARIADIC parts text[])
	RETURNS text
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_natural_key';
COMMENT ON FUNCTION idempotency.natural_key(text[]) IS
	'a key derived from the values that identify an operation';

CREATE FUNCTION idempotency.uuidv7()
	RETURNS uuid
	LANGUAGE C VOLATILE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_uuidv7';
COMMENT ON FUNCTION idempotency.uuidv7() IS
	'a new UUID of version 7, greater than those before it in this session';

CREATE FUNCTION idempotency.parse_header(value text)
	RETURNS text
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_parse_header';
COMMENT ON FUNCTION idempotency.parse_header(text) IS
	'the key in the value of an Idempotency-Key header (an RFC 8941 string)';

CREATE FUNCTION idempotency.problem(operation idempotency.operation)
	RETURNS json
	LANGUAGE C IMMUTABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_problem';
COMMENT ON FUNCTION idempotency.problem(idempotency.operation) IS
	'problem details (RFC 9457) of in_progress and mismatched, NULL of other outcomes';

-- ---------------------------------------------------------------------------
-- The key store
-- ---------------------------------------------------------------------------

-- One row an outcome.  The fixed-length columns come first, so that rows are
-- packed; COLLATE "C", so that no library upgrade reorders the index; the
-- index is what decides who won.  Response and headers are json, not jsonb:
-- they are replayed as the very bytes that were stored.
CREATE TABLE idempotency.key (
	created_at timestamptz NOT NULL,
	expires_at timestamptz NOT NULL,
	status integer,
	failed boolean NOT NULL,
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	fingerprint bytea,
	headers json,
	response json,
	PRIMARY KEY (scope, key)
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.key', '');
COMMENT ON TABLE idempotency.key IS 'remembered outcomes; read them through idempotency.keys';
COMMENT ON COLUMN idempotency.key.created_at IS 'when the outcome was stored';
COMMENT ON COLUMN idempotency.key.expires_at IS 'until when it is remembered';
COMMENT ON COLUMN idempotency.key.status IS 'stored status; NULL for an inbox record';
COMMENT ON COLUMN idempotency.key.failed IS 'true: a final failure';
COMMENT ON COLUMN idempotency.key.scope IS 'the boundary inside which the key is unique';
COMMENT ON COLUMN idempotency.key.key IS 'the key';
COMMENT ON COLUMN idempotency.key.fingerprint IS 'SHA-256 of the canonical request';
COMMENT ON COLUMN idempotency.key.headers IS 'stored headers';
COMMENT ON COLUMN idempotency.key.response IS 'stored response';
COMMENT ON INDEX idempotency.key_pkey IS 'decides who won';

CREATE VIEW idempotency.keys AS
	SELECT
		k.scope,
		k.key,
		CASE
			WHEN k.expires_at OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp() THEN 'expired'
			WHEN k.failed THEN 'failed'
			WHEN k.status IS NULL THEN 'seen'
			ELSE 'completed'
		END AS state,
		k.status,
		pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) k.created_at) AS age,
		CASE
			WHEN pg_catalog.isfinite(k.expires_at)
			THEN pg_catalog.date_trunc('second', k.expires_at OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp())
		END AS expires_in,
		pg_catalog.pg_size_pretty(pg_catalog.pg_column_size(k.response)::pg_catalog.int8) AS response_size,
		pg_catalog.encode(k.fingerprint, 'hex') AS fingerprint,
		k.created_at,
		k.expires_at
	FROM idempotency.key AS k;
COMMENT ON VIEW idempotency.keys IS 'remembered outcomes, without their bodies';
COMMENT ON COLUMN idempotency.keys.scope IS 'the boundary inside which the key is unique';
COMMENT ON COLUMN idempotency.keys.key IS 'the key';
COMMENT ON COLUMN idempotency.keys.state IS 'completed, failed, seen (an inbox record) or expired';
COMMENT ON COLUMN idempotency.keys.status IS 'stored status';
COMMENT ON COLUMN idempotency.keys.age IS 'time since the outcome was stored';
COMMENT ON COLUMN idempotency.keys.expires_in IS 'time until it is forgotten; NULL: never';
COMMENT ON COLUMN idempotency.keys.response_size IS 'size of the response as stored (compressed)';
COMMENT ON COLUMN idempotency.keys.fingerprint IS 'fingerprint of the request, in hex';
COMMENT ON COLUMN idempotency.keys.created_at IS 'when the outcome was stored';
COMMENT ON COLUMN idempotency.keys.expires_at IS 'until when it is remembered';

CREATE FUNCTION idempotency.claim(
	scope text, key text, request idempotency.document DEFAULT NULL,
	wait interval DEFAULT NULL, retention interval DEFAULT NULL,
	fingerprint bytea DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_claim';
COMMENT ON FUNCTION idempotency.claim(text, text, idempotency.document, interval, interval, bytea) IS
	'claim an operation, or replay its outcome; anything else is an error';

CREATE FUNCTION idempotency.try_claim(
	scope text, key text, request idempotency.document DEFAULT NULL,
	wait interval DEFAULT NULL, retention interval DEFAULT NULL,
	fingerprint bytea DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_try_claim';
COMMENT ON FUNCTION idempotency.try_claim(text, text, idempotency.document, interval, interval, bytea) IS
	'claim an operation, or say why not; check the outcome';

CREATE FUNCTION idempotency.complete(
	scope text, key text, response idempotency.document DEFAULT NULL,
	status integer DEFAULT 200, headers idempotency.document DEFAULT NULL)
	RETURNS json
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_complete';
COMMENT ON FUNCTION idempotency.complete(text, text, idempotency.document, integer, idempotency.document) IS
	'store the success of a claimed operation, and return its response';

CREATE FUNCTION idempotency.fail(
	scope text, key text, response idempotency.document,
	status integer, headers idempotency.document DEFAULT NULL)
	RETURNS json
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_fail';
COMMENT ON FUNCTION idempotency.fail(text, text, idempotency.document, integer, idempotency.document) IS
	'store the final failure of a claimed operation, and return its response';

CREATE FUNCTION idempotency.release(scope text, key text)
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_release';
COMMENT ON FUNCTION idempotency.release(text, text) IS
	'give up a claim without an outcome';

CREATE FUNCTION idempotency.run(
	scope text, key text, request idempotency.document, handler regprocedure,
	wait interval DEFAULT NULL, retention interval DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_run';
COMMENT ON FUNCTION idempotency.run(text, text, idempotency.document, regprocedure, interval, interval) IS
	'claim, call the handler, and complete; or replay';

CREATE FUNCTION idempotency.peek(scope text, key text)
	RETURNS idempotency.operation
	LANGUAGE C STABLE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_peek';
COMMENT ON FUNCTION idempotency.peek(text, text) IS
	'read a stored outcome; NULL if there is none';

CREATE FUNCTION idempotency.forget(scope text, key text)
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_forget';
COMMENT ON FUNCTION idempotency.forget(text, text) IS
	'remove a stored outcome; true if there was one';

CREATE FUNCTION idempotency.once(scope text, key text, retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_once';
COMMENT ON FUNCTION idempotency.once(text, text, interval) IS
	'remember a message; true the first time';

CREATE FUNCTION idempotency.once(scope text, keys text[], retention interval DEFAULT NULL)
	RETURNS SETOF text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_once_array';
COMMENT ON FUNCTION idempotency.once(text, text[], interval) IS
	'remember many messages; returns those seen for the first time';

-- ---------------------------------------------------------------------------
-- The guard: what a table may ask about the transaction that writes to it
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.require_claim()
	RETURNS trigger
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_require_claim';
COMMENT ON FUNCTION idempotency.require_claim() IS
	'trigger: refuse a write from a transaction without a claim in the scope';

CREATE FUNCTION idempotency.current_key(scope text)
	RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_current_key';
COMMENT ON FUNCTION idempotency.current_key(text) IS
	'the key that this transaction claimed last in the scope';

-- ---------------------------------------------------------------------------
-- Rights: nothing to PUBLIC
-- ---------------------------------------------------------------------------

-- Two sets of rights.  Clients claim and finish; operators look and evict.
CREATE FUNCTION idempotency.grant_client(role regrole)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA idempotency TO %s', role);
	EXECUTE pg_catalog.format('GRANT USAGE ON TYPE idempotency.document, idempotency.operation TO %s', role);
	EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION
		idempotency.document(jsonb), idempotency.document_in, idempotency.document_out,
		idempotency.claim, idempotency.try_claim, idempotency.complete, idempotency.fail,
		idempotency.release, idempotency.run, idempotency.peek, idempotency.current_key,
		idempotency.require_claim,
		idempotency.once(text, text, interval), idempotency.once(text, text[], interval),
		idempotency.canonical, idempotency.fingerprint(idempotency.document),
		idempotency.fingerprint(text, text, idempotency.document),
		idempotency.derive_key, idempotency.natural_key, idempotency.uuidv7,
		idempotency.parse_header, idempotency.problem
		TO %s', role);
END
$$;
COMMENT ON FUNCTION idempotency.grant_client(regrole) IS
	'let a role claim, complete and replay';

CREATE FUNCTION idempotency.grant_operator(role regrole)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA idempotency TO %s', role);
	EXECUTE pg_catalog.format('GRANT USAGE ON TYPE idempotency.document, idempotency.operation TO %s', role);
	EXECUTE pg_catalog.format('GRANT SELECT ON idempotency.keys TO %s', role);
	EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION
		idempotency.peek, idempotency.forget
		TO %s', role);
END
$$;
COMMENT ON FUNCTION idempotency.grant_operator(regrole) IS
	'let a role look at what is remembered, and evict it';

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idempotency FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA idempotency FROM PUBLIC;
REVOKE ALL ON TYPE idempotency.document, idempotency.operation, idempotency.key, idempotency.keys FROM PUBLIC;
