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

-- A key as it is stored: a UUID in its canonical form takes 17 bytes instead of
-- 36, in the heap and in the index.  To SQL it is the text of the key.
CREATE TYPE idempotency.keytext;

CREATE FUNCTION idempotency.keytext_in(cstring) RETURNS idempotency.keytext
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_in';
CREATE FUNCTION idempotency.keytext_out(idempotency.keytext) RETURNS cstring
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_out';
CREATE FUNCTION idempotency.keytext_recv(internal) RETURNS idempotency.keytext
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_recv';
CREATE FUNCTION idempotency.keytext_send(idempotency.keytext) RETURNS bytea
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_send';
COMMENT ON FUNCTION idempotency.keytext_in(cstring) IS 'I/O';
COMMENT ON FUNCTION idempotency.keytext_out(idempotency.keytext) IS 'I/O';
COMMENT ON FUNCTION idempotency.keytext_recv(internal) IS 'I/O';
COMMENT ON FUNCTION idempotency.keytext_send(idempotency.keytext) IS 'I/O';

CREATE TYPE idempotency.keytext (
	INPUT = idempotency.keytext_in,
	OUTPUT = idempotency.keytext_out,
	RECEIVE = idempotency.keytext_recv,
	SEND = idempotency.keytext_send,
	LIKE = pg_catalog.bytea,
	CATEGORY = 'S'
);
COMMENT ON TYPE idempotency.keytext IS 'a key as it is stored: UUIDs are packed';

CREATE CAST (idempotency.keytext AS pg_catalog.text) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.text AS idempotency.keytext) WITH INOUT AS ASSIGNMENT;
COMMENT ON CAST (idempotency.keytext AS pg_catalog.text) IS 'the text of the key';
COMMENT ON CAST (pg_catalog.text AS idempotency.keytext) IS 'the key, if a claim would take it';

-- The order and equality of the index: those of the bytes.  The operators stand
-- in pg_catalog, so that a query over the view keys finds the index whatever its
-- search path; nobody but a superuser could put others before them.
CREATE FUNCTION idempotency.keytext_lt(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'bytealt';
CREATE FUNCTION idempotency.keytext_le(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'byteale';
CREATE FUNCTION idempotency.keytext_eq(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'byteaeq';
CREATE FUNCTION idempotency.keytext_ne(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'byteane';
CREATE FUNCTION idempotency.keytext_ge(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'byteage';
CREATE FUNCTION idempotency.keytext_gt(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'byteagt';
CREATE FUNCTION idempotency.keytext_cmp(idempotency.keytext, idempotency.keytext) RETURNS integer
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'byteacmp';
CREATE FUNCTION idempotency.keytext_sortsupport(internal) RETURNS void
	LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE AS 'bytea_sortsupport';
COMMENT ON FUNCTION idempotency.keytext_lt(idempotency.keytext, idempotency.keytext) IS 'implementation of < operator';
COMMENT ON FUNCTION idempotency.keytext_le(idempotency.keytext, idempotency.keytext) IS 'implementation of <= operator';
COMMENT ON FUNCTION idempotency.keytext_eq(idempotency.keytext, idempotency.keytext) IS 'implementation of = operator';
COMMENT ON FUNCTION idempotency.keytext_ne(idempotency.keytext, idempotency.keytext) IS 'implementation of <> operator';
COMMENT ON FUNCTION idempotency.keytext_ge(idempotency.keytext, idempotency.keytext) IS 'implementation of >= operator';
COMMENT ON FUNCTION idempotency.keytext_gt(idempotency.keytext, idempotency.keytext) IS 'implementation of > operator';
COMMENT ON FUNCTION idempotency.keytext_cmp(idempotency.keytext, idempotency.keytext) IS 'less-equal-greater, for the index';
COMMENT ON FUNCTION idempotency.keytext_sortsupport(internal) IS 'sort support, for the index';

CREATE OPERATOR pg_catalog.< (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency.keytext_lt,
	COMMUTATOR = OPERATOR(pg_catalog.>), NEGATOR = OPERATOR(pg_catalog.>=),
	RESTRICT = pg_catalog.scalarltsel, JOIN = pg_catalog.scalarltjoinsel);
CREATE OPERATOR pg_catalog.<= (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency.keytext_le,
	COMMUTATOR = OPERATOR(pg_catalog.>=), NEGATOR = OPERATOR(pg_catalog.>),
	RESTRICT = pg_catalog.scalarlesel, JOIN = pg_catalog.scalarlejoinsel);
CREATE OPERATOR pg_catalog.= (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency.keytext_eq,
	COMMUTATOR = OPERATOR(pg_catalog.=), NEGATOR = OPERATOR(pg_catalog.<>),
	RESTRICT = pg_catalog.eqsel, JOIN = pg_catalog.eqjoinsel, MERGES);
CREATE OPERATOR pg_catalog.<> (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency.keytext_ne,
	COMMUTATOR = OPERATOR(pg_catalog.<>), NEGATOR = OPERATOR(pg_catalog.=),
	RESTRICT = pg_catalog.neqsel, JOIN = pg_catalog.neqjoinsel);
CREATE OPERATOR pg_catalog.>= (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency.keytext_ge,
	COMMUTATOR = OPERATOR(pg_catalog.<=), NEGATOR = OPERATOR(pg_catalog.<),
	RESTRICT = pg_catalog.scalargesel, JOIN = pg_catalog.scalargejoinsel);
CREATE OPERATOR pg_catalog.> (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency.keytext_gt,
	COMMUTATOR = OPERATOR(pg_catalog.<), NEGATOR = OPERATOR(pg_catalog.<=),
	RESTRICT = pg_catalog.scalargtsel, JOIN = pg_catalog.scalargtjoinsel);
COMMENT ON OPERATOR pg_catalog.< (idempotency.keytext, idempotency.keytext) IS 'less than, by the stored bytes';
COMMENT ON OPERATOR pg_catalog.<= (idempotency.keytext, idempotency.keytext) IS 'less than or equal, by the stored bytes';
COMMENT ON OPERATOR pg_catalog.= (idempotency.keytext, idempotency.keytext) IS 'the same key';
COMMENT ON OPERATOR pg_catalog.<> (idempotency.keytext, idempotency.keytext) IS 'another key';
COMMENT ON OPERATOR pg_catalog.>= (idempotency.keytext, idempotency.keytext) IS 'greater than or equal, by the stored bytes';
COMMENT ON OPERATOR pg_catalog.> (idempotency.keytext, idempotency.keytext) IS 'greater than, by the stored bytes';

CREATE OPERATOR CLASS idempotency.keytext_ops DEFAULT FOR TYPE idempotency.keytext USING btree AS
	OPERATOR 1 pg_catalog.<,
	OPERATOR 2 pg_catalog.<=,
	OPERATOR 3 pg_catalog.=,
	OPERATOR 4 pg_catalog.>=,
	OPERATOR 5 pg_catalog.>,
	FUNCTION 1 idempotency.keytext_cmp(idempotency.keytext, idempotency.keytext),
	FUNCTION 2 idempotency.keytext_sortsupport(internal);
COMMENT ON OPERATOR CLASS idempotency.keytext_ops USING btree IS 'the order of the stored bytes';
COMMENT ON OPERATOR FAMILY idempotency.keytext_ops USING btree IS 'the order of the stored bytes';

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
	status smallint,
	scope text COLLATE "C" NOT NULL,
	key idempotency.keytext NOT NULL,
	fingerprint bytea,
	response json,
	headers json,
	PRIMARY KEY (scope, key)
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.key', '');
COMMENT ON TABLE idempotency.key IS 'remembered outcomes; read them through idempotency.keys';
COMMENT ON COLUMN idempotency.key.created_at IS 'when the outcome was stored';
COMMENT ON COLUMN idempotency.key.expires_at IS 'until when it is remembered';
COMMENT ON COLUMN idempotency.key.status IS 'stored status, negative for a final failure; NULL for an inbox record';
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
			WHEN k.status OPERATOR(pg_catalog.<) 0 THEN 'failed'
			WHEN k.status IS NULL THEN 'seen'
			ELSE 'completed'
		END AS state,
		pg_catalog.abs(k.status::pg_catalog.int4) AS status,
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
		idempotency.keytext_lt, idempotency.keytext_le, idempotency.keytext_eq,
		idempotency.keytext_ne, idempotency.keytext_ge, idempotency.keytext_gt,
		idempotency.peek, idempotency.forget
		TO %s', role);
END
$$;
COMMENT ON FUNCTION idempotency.grant_operator(regrole) IS
	'let a role look at what is remembered, and evict it';

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idempotency FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA idempotency FROM PUBLIC;
REVOKE ALL ON TYPE idempotency.document, idempotency.keytext, idempotency.operation, idempotency.key, idempotency.keys FROM PUBLIC;
