/* idempotency--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The control file has schema = pg_catalog, so that this script creates the schema.  If
-- the schema exists already, the installation fails here.
CREATE SCHEMA idempotency;
COMMENT ON SCHEMA idempotency IS 'idempotency keys: retries have their effect exactly once';

-- Functions that the server calls: for types, casts, operators, triggers, views and the
-- planner.  These uses need no USAGE on the schema, and no role has it, so that \df
-- idempotency.* lists the functions that users call.
CREATE SCHEMA idempotency_internal;
COMMENT ON SCHEMA idempotency_internal IS 'functions of the extension idempotency that the server calls';

-- ---------------------------------------------------------------------------
-- Types
-- ---------------------------------------------------------------------------

-- The input type for JSON arguments: JSON text, or a jsonb value as it is, with implicit
-- casts from json, jsonb, text and varchar.  Overloads for these types would make an untyped literal
-- ambiguous.
CREATE TYPE idempotency.document;

CREATE FUNCTION idempotency_internal.document_in(cstring) RETURNS idempotency.document
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_in';
CREATE FUNCTION idempotency_internal.document_out(idempotency.document) RETURNS cstring
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_out';
CREATE FUNCTION idempotency_internal.document_recv(internal) RETURNS idempotency.document
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_recv';
CREATE FUNCTION idempotency_internal.document_send(idempotency.document) RETURNS bytea
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_send';
COMMENT ON FUNCTION idempotency_internal.document_in(cstring) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.document_out(idempotency.document) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.document_recv(internal) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.document_send(idempotency.document) IS 'I/O';

CREATE TYPE idempotency.document (
	INPUT = idempotency_internal.document_in,
	OUTPUT = idempotency_internal.document_out,
	RECEIVE = idempotency_internal.document_recv,
	SEND = idempotency_internal.document_send,
	LIKE = pg_catalog.json
);
COMMENT ON TYPE idempotency.document IS 'a JSON argument: json, jsonb, text or an untyped literal';

CREATE FUNCTION idempotency_internal.document(pg_catalog.jsonb) RETURNS idempotency.document
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_from_jsonb';
COMMENT ON FUNCTION idempotency_internal.document(pg_catalog.jsonb) IS 'cast';
CREATE FUNCTION idempotency_internal.document_to_json(idempotency.document) RETURNS pg_catalog.json
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_document_to_json';
COMMENT ON FUNCTION idempotency_internal.document_to_json(idempotency.document) IS 'cast';

CREATE CAST (pg_catalog.json AS idempotency.document) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (pg_catalog.jsonb AS idempotency.document) WITH FUNCTION idempotency_internal.document(pg_catalog.jsonb) AS IMPLICIT;
CREATE CAST (pg_catalog.text AS idempotency.document) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.varchar AS idempotency.document) WITH INOUT AS IMPLICIT;
CREATE CAST (idempotency.document AS pg_catalog.json) WITH FUNCTION idempotency_internal.document_to_json(idempotency.document) AS IMPLICIT;
CREATE CAST (idempotency.document AS pg_catalog.jsonb) WITH INOUT AS IMPLICIT;
COMMENT ON CAST (pg_catalog.json AS idempotency.document) IS 'the same bytes';
COMMENT ON CAST (pg_catalog.jsonb AS idempotency.document) IS 'the value';
COMMENT ON CAST (pg_catalog.text AS idempotency.document) IS 'the text, if it is JSON';
COMMENT ON CAST (pg_catalog.varchar AS idempotency.document) IS 'the text, if it is JSON';
COMMENT ON CAST (idempotency.document AS pg_catalog.json) IS 'the text';
COMMENT ON CAST (idempotency.document AS pg_catalog.jsonb) IS 'the value';

-- The input type for scopes and keys: the I/O functions of text, and implicit casts from the
-- types of which keys are made.  It has no operators, and no function outside of this
-- extension takes it, so that the casts change no query that does not call the extension.
CREATE TYPE idempotency.identifier;

CREATE FUNCTION idempotency_internal.identifier_in(cstring) RETURNS idempotency.identifier
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_identifier_in';
CREATE FUNCTION idempotency_internal.identifier_out(idempotency.identifier) RETURNS cstring
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_identifier_out';
CREATE FUNCTION idempotency_internal.identifier_recv(internal) RETURNS idempotency.identifier
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_identifier_recv';
CREATE FUNCTION idempotency_internal.identifier_send(idempotency.identifier) RETURNS bytea
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_identifier_send';
COMMENT ON FUNCTION idempotency_internal.identifier_in(cstring) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.identifier_out(idempotency.identifier) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.identifier_recv(internal) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.identifier_send(idempotency.identifier) IS 'I/O';

CREATE TYPE idempotency.identifier (
	INPUT = idempotency_internal.identifier_in,
	OUTPUT = idempotency_internal.identifier_out,
	RECEIVE = idempotency_internal.identifier_recv,
	SEND = idempotency_internal.identifier_send,
	LIKE = pg_catalog.text,
	CATEGORY = 'S'
);
COMMENT ON TYPE idempotency.identifier IS 'a scope or a key: text, uuid, an integer or an untyped literal';

-- The function of the server that removes the padding, under the result type of the cast:
-- pg_upgrade restores casts in the order of their names, and text(bpchar) fits only after
-- the cast from text.
CREATE FUNCTION idempotency_internal.identifier(pg_catalog.bpchar) RETURNS idempotency.identifier
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_identifier_from_character';
COMMENT ON FUNCTION idempotency_internal.identifier(pg_catalog.bpchar) IS 'cast';

-- Not from numeric: 25 and 25.00 are one number and two texts.
CREATE CAST (pg_catalog.text AS idempotency.identifier) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (pg_catalog.varchar AS idempotency.identifier) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (pg_catalog.bpchar AS idempotency.identifier) WITH FUNCTION idempotency_internal.identifier(pg_catalog.bpchar) AS IMPLICIT;
CREATE CAST (pg_catalog.name AS idempotency.identifier) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.uuid AS idempotency.identifier) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.int2 AS idempotency.identifier) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.int4 AS idempotency.identifier) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.int8 AS idempotency.identifier) WITH INOUT AS IMPLICIT;
CREATE CAST (idempotency.identifier AS pg_catalog.text) WITHOUT FUNCTION AS IMPLICIT;
COMMENT ON CAST (pg_catalog.text AS idempotency.identifier) IS 'the same bytes';
COMMENT ON CAST (pg_catalog.varchar AS idempotency.identifier) IS 'the same bytes';
COMMENT ON CAST (pg_catalog.bpchar AS idempotency.identifier) IS 'the text without the padding';
COMMENT ON CAST (pg_catalog.name AS idempotency.identifier) IS 'the text';
COMMENT ON CAST (pg_catalog.uuid AS idempotency.identifier) IS 'the text in lower case';
COMMENT ON CAST (pg_catalog.int2 AS idempotency.identifier) IS 'the digits';
COMMENT ON CAST (pg_catalog.int4 AS idempotency.identifier) IS 'the digits';
COMMENT ON CAST (pg_catalog.int8 AS idempotency.identifier) IS 'the digits';
COMMENT ON CAST (idempotency.identifier AS pg_catalog.text) IS 'the same bytes';

-- The stored form of a key: a canonical UUID takes 17 bytes instead of 36, in the heap and
-- in the index.  In SQL, the value is the text of the key.
CREATE TYPE idempotency.keytext;

CREATE FUNCTION idempotency_internal.keytext_in(cstring) RETURNS idempotency.keytext
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_in';
CREATE FUNCTION idempotency_internal.keytext_out(idempotency.keytext) RETURNS cstring
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_out';
CREATE FUNCTION idempotency_internal.keytext_recv(internal) RETURNS idempotency.keytext
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_recv';
CREATE FUNCTION idempotency_internal.keytext_send(idempotency.keytext) RETURNS bytea
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_send';
COMMENT ON FUNCTION idempotency_internal.keytext_in(cstring) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.keytext_out(idempotency.keytext) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.keytext_recv(internal) IS 'I/O';
COMMENT ON FUNCTION idempotency_internal.keytext_send(idempotency.keytext) IS 'I/O';

CREATE TYPE idempotency.keytext (
	INPUT = idempotency_internal.keytext_in,
	OUTPUT = idempotency_internal.keytext_out,
	RECEIVE = idempotency_internal.keytext_recv,
	SEND = idempotency_internal.keytext_send,
	LIKE = pg_catalog.bytea,
	CATEGORY = 'S'
);
COMMENT ON TYPE idempotency.keytext IS 'the stored form of a key: UUIDs are packed';

CREATE CAST (idempotency.keytext AS pg_catalog.text) WITH INOUT AS IMPLICIT;
CREATE CAST (pg_catalog.text AS idempotency.keytext) WITH INOUT AS ASSIGNMENT;
CREATE CAST (idempotency.keytext AS idempotency.identifier) WITH INOUT AS IMPLICIT;
COMMENT ON CAST (idempotency.keytext AS pg_catalog.text) IS 'the text of the key';
COMMENT ON CAST (pg_catalog.text AS idempotency.keytext) IS 'the key';
COMMENT ON CAST (idempotency.keytext AS idempotency.identifier) IS 'the text of the key';

-- Order and equality for the index: those of the bytes.  The operators are in pg_catalog,
-- so that queries on the view keys use the index with any search path, and only a
-- superuser can create operators that take precedence.
CREATE FUNCTION idempotency_internal.keytext_lt(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_lt';
CREATE FUNCTION idempotency_internal.keytext_le(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_le';
CREATE FUNCTION idempotency_internal.keytext_eq(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_eq';
CREATE FUNCTION idempotency_internal.keytext_ne(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_ne';
CREATE FUNCTION idempotency_internal.keytext_ge(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_ge';
CREATE FUNCTION idempotency_internal.keytext_gt(idempotency.keytext, idempotency.keytext) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_gt';
CREATE FUNCTION idempotency_internal.keytext_cmp(idempotency.keytext, idempotency.keytext) RETURNS integer
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_cmp';
CREATE FUNCTION idempotency_internal.keytext_sortsupport(internal) RETURNS void
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_keytext_sortsupport';
COMMENT ON FUNCTION idempotency_internal.keytext_lt(idempotency.keytext, idempotency.keytext) IS 'implementation of < operator';
COMMENT ON FUNCTION idempotency_internal.keytext_le(idempotency.keytext, idempotency.keytext) IS 'implementation of <= operator';
COMMENT ON FUNCTION idempotency_internal.keytext_eq(idempotency.keytext, idempotency.keytext) IS 'implementation of = operator';
COMMENT ON FUNCTION idempotency_internal.keytext_ne(idempotency.keytext, idempotency.keytext) IS 'implementation of <> operator';
COMMENT ON FUNCTION idempotency_internal.keytext_ge(idempotency.keytext, idempotency.keytext) IS 'implementation of >= operator';
COMMENT ON FUNCTION idempotency_internal.keytext_gt(idempotency.keytext, idempotency.keytext) IS 'implementation of > operator';
COMMENT ON FUNCTION idempotency_internal.keytext_cmp(idempotency.keytext, idempotency.keytext) IS 'less-equal-greater, for the index';
COMMENT ON FUNCTION idempotency_internal.keytext_sortsupport(internal) IS 'sort support, for the index';

CREATE OPERATOR pg_catalog.< (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency_internal.keytext_lt,
	COMMUTATOR = OPERATOR(pg_catalog.>), NEGATOR = OPERATOR(pg_catalog.>=),
	RESTRICT = pg_catalog.scalarltsel, JOIN = pg_catalog.scalarltjoinsel);
CREATE OPERATOR pg_catalog.<= (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency_internal.keytext_le,
	COMMUTATOR = OPERATOR(pg_catalog.>=), NEGATOR = OPERATOR(pg_catalog.>),
	RESTRICT = pg_catalog.scalarlesel, JOIN = pg_catalog.scalarlejoinsel);
CREATE OPERATOR pg_catalog.= (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency_internal.keytext_eq,
	COMMUTATOR = OPERATOR(pg_catalog.=), NEGATOR = OPERATOR(pg_catalog.<>),
	RESTRICT = pg_catalog.eqsel, JOIN = pg_catalog.eqjoinsel, MERGES);
CREATE OPERATOR pg_catalog.<> (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency_internal.keytext_ne,
	COMMUTATOR = OPERATOR(pg_catalog.<>), NEGATOR = OPERATOR(pg_catalog.=),
	RESTRICT = pg_catalog.neqsel, JOIN = pg_catalog.neqjoinsel);
CREATE OPERATOR pg_catalog.>= (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency_internal.keytext_ge,
	COMMUTATOR = OPERATOR(pg_catalog.<=), NEGATOR = OPERATOR(pg_catalog.<),
	RESTRICT = pg_catalog.scalargesel, JOIN = pg_catalog.scalargejoinsel);
CREATE OPERATOR pg_catalog.> (
	LEFTARG = idempotency.keytext, RIGHTARG = idempotency.keytext, FUNCTION = idempotency_internal.keytext_gt,
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
	FUNCTION 1 idempotency_internal.keytext_cmp(idempotency.keytext, idempotency.keytext),
	FUNCTION 2 idempotency_internal.keytext_sortsupport(internal);
COMMENT ON OPERATOR CLASS idempotency.keytext_ops USING btree IS 'the order of the stored bytes';
COMMENT ON OPERATOR FAMILY idempotency.keytext_ops USING btree IS 'the order of the stored bytes';

-- An enum, not text: SELECT claim(...) INTO op assigns the text of the whole composite to
-- the first field.  That must fail; a text field would accept it as an outcome.
CREATE TYPE idempotency.outcome AS ENUM ('claimed', 'taken_over', 'replayed', 'in_progress', 'mismatched');
COMMENT ON TYPE idempotency.outcome IS 'the outcome of a claim';

-- The result of the calls for one operation.
CREATE TYPE idempotency.operation AS (
	outcome idempotency.outcome,
	replayed boolean,
	token bigint,
	attempt integer,
	recovery_point text,
	state json,
	status integer,
	headers json,
	response json,
	failed boolean,
	retry_after interval,
	expires_at timestamptz,
	fingerprint bytea
);
COMMENT ON TYPE idempotency.operation IS 'the outcome of a claim, with the stored response if there is one';
COMMENT ON COLUMN idempotency.operation.outcome IS 'the outcome of the claim';
COMMENT ON COLUMN idempotency.operation.replayed IS 'true: return the stored response and do nothing else';
COMMENT ON COLUMN idempotency.operation.token IS 'the fencing token of the granted lease';
COMMENT ON COLUMN idempotency.operation.attempt IS 'number of owners that the operation has had';
COMMENT ON COLUMN idempotency.operation.recovery_point IS 'the last checkpoint of the previous owner, or of the current one';
COMMENT ON COLUMN idempotency.operation.state IS 'the state stored with that checkpoint';
COMMENT ON COLUMN idempotency.operation.status IS 'stored status, an HTTP status by convention';
COMMENT ON COLUMN idempotency.operation.headers IS 'stored headers, byte for byte';
COMMENT ON COLUMN idempotency.operation.response IS 'stored response, byte for byte';
COMMENT ON COLUMN idempotency.operation.failed IS 'true: the stored response is a final failure';
COMMENT ON COLUMN idempotency.operation.retry_after IS 'time until the owner''s lease ends, unless it is renewed';
COMMENT ON COLUMN idempotency.operation.expires_at IS 'when the stored response expires; NULL: never';
COMMENT ON COLUMN idempotency.operation.fingerprint IS 'fingerprint of the stored request, from peek(); NULL: there is none';

-- The result of claim_abandoned().  The token is the first field for the same reason as the
-- enum in the type above.
CREATE TYPE idempotency.abandoned AS (
	token bigint,
	scope text,
	key text,
	request json,
	attempt integer,
	recovery_point text,
	state json
);
COMMENT ON TYPE idempotency.abandoned IS 'an abandoned operation that was taken over';
COMMENT ON COLUMN idempotency.abandoned.token IS 'the fencing token of the new lease';
COMMENT ON COLUMN idempotency.abandoned.scope IS 'the scope of the operation';
COMMENT ON COLUMN idempotency.abandoned.key IS 'the key of the operation';
COMMENT ON COLUMN idempotency.abandoned.request IS 'the request of the first claim that passed one';
COMMENT ON COLUMN idempotency.abandoned.attempt IS 'number of owners that the operation has had';
COMMENT ON COLUMN idempotency.abandoned.recovery_point IS 'the last checkpoint of the previous owner';
COMMENT ON COLUMN idempotency.abandoned.state IS 'the state stored with that checkpoint';

-- ---------------------------------------------------------------------------
-- Helper functions
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

CREATE FUNCTION idempotency.derive_key(scope idempotency.identifier, key idempotency.identifier, step idempotency.identifier)
	RETURNS uuid
	LANGUAGE C IMMUTABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_derive_key';
COMMENT ON FUNCTION idempotency.derive_key(idempotency.identifier, idempotency.identifier, idempotency.identifier) IS
	'the key of one step of an operation, to send to another service';

-- Not STRICT, nor is parse_header: a missing argument is an error.
CREATE FUNCTION idempotency.natural_key(VARIADIC parts idempotency.identifier[])
	RETURNS text
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_natural_key';
COMMENT ON FUNCTION idempotency.natural_key(idempotency.identifier[]) IS
	'a key derived from the values that identify an operation';

-- Runs with the rights of its caller, because the output of a type can be the caller's code.
CREATE FUNCTION idempotency.stable_text(value anyelement)
	RETURNS text
	LANGUAGE sql STABLE PARALLEL SAFE STRICT
	SET search_path = pg_catalog, pg_temp
	SET timezone = 'UTC'
	SET datestyle = 'ISO'
	SET intervalstyle = 'postgres'
	SET bytea_output = 'hex'
	SET extra_float_digits = 1
	SET lc_monetary = 'C'
	SET quote_all_identifiers = off
AS 'SELECT $1::pg_catalog.text';
COMMENT ON FUNCTION idempotency.stable_text(anyelement) IS
	'the text of a value, whatever the settings of the session';

CREATE FUNCTION idempotency.uuidv7()
	RETURNS uuid
	LANGUAGE C VOLATILE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_uuidv7';
COMMENT ON FUNCTION idempotency.uuidv7() IS
	'a new UUID of version 7, greater than earlier ones of this session';

CREATE FUNCTION idempotency.parse_header(value text)
	RETURNS text
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_parse_header';
COMMENT ON FUNCTION idempotency.parse_header(text) IS
	'the key in the value of an Idempotency-Key header (an RFC 8941 string)';

-- STABLE: the link in these answers is a setting.
CREATE FUNCTION idempotency.problem(operation idempotency.operation)
	RETURNS json
	LANGUAGE C STABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_problem';
COMMENT ON FUNCTION idempotency.problem(idempotency.operation) IS
	'problem details (RFC 9457) for in_progress and mismatched; NULL for other outcomes';

CREATE FUNCTION idempotency.problem(sqlstate text)
	RETURNS json
	LANGUAGE C STABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_problem_of_error';
COMMENT ON FUNCTION idempotency.problem(text) IS
	'problem details (RFC 9457) for IK400, IK409 and IK422; NULL for other errors';

CREATE FUNCTION idempotency.problem_headers(operation idempotency.operation)
	RETURNS json
	LANGUAGE C STABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_problem_headers';
COMMENT ON FUNCTION idempotency.problem_headers(idempotency.operation) IS
	'the headers of an HTTP response with problem(operation)';

CREATE FUNCTION idempotency.problem_headers(sqlstate text)
	RETURNS json
	LANGUAGE C STABLE PARALLEL SAFE STRICT AS 'MODULE_PATHNAME', 'idempotency_problem_headers_of_error';
COMMENT ON FUNCTION idempotency.problem_headers(text) IS
	'the headers of an HTTP response with problem(sqlstate)';

-- ---------------------------------------------------------------------------
-- The key store
-- ---------------------------------------------------------------------------

-- One row per key.  An update writes to WAL what is between the first and the last byte that
-- change.  So columns that never change come first, and those that a heartbeat changes,
-- expires_at to leased_until, are neighbours.  COLLATE "C": an upgrade of a collation library
-- does not reorder the index.  The index decides which of several concurrent claims succeeds.
-- Response and headers are json, not jsonb, because the stored bytes are replayed unchanged.
-- The columns from leased_at to request belong to a lease in progress, and finished_by to a
-- finished operation that had a lease; other rows are stored without them.
CREATE TABLE idempotency.key (
	created_at timestamptz NOT NULL,
	scope text COLLATE "C" NOT NULL,
	key idempotency.keytext NOT NULL,
	fingerprint bytea,
	response json,
	headers json,
	status smallint,
	expires_at timestamptz NOT NULL,
	leased_at timestamptz,
	leased_until timestamptz,
	token bigint,
	retention interval,
	attempt integer,
	recovery_point text,
	recovery_state json,
	request json,
	finished_by bigint,
	-- The key comes first: time-ordered keys of all scopes then share one right edge of the
	-- index, and the first column decides most comparisons.
	PRIMARY KEY (key, scope)
)
-- The reaper deletes rows, and VACUUM makes their space reusable.  VACUUM runs when a tenth
-- of the rows is dead: more frequent runs would each read the index to reclaim less, and
-- less frequent ones would let the table grow by a fifth.  VACUUM does not truncate the
-- table: truncation takes a lock that blocks every claim, and the next claims would extend
-- the table again.
WITH (
	autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = false,
	toast.autovacuum_vacuum_scale_factor = 0.1, toast.vacuum_truncate = false
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.key', '');
COMMENT ON TABLE idempotency.key IS 'stored outcomes and leases; read them through idempotency.keys';
COMMENT ON COLUMN idempotency.key.created_at IS 'when the outcome was stored, or the operation first leased; it never changes';
COMMENT ON COLUMN idempotency.key.expires_at IS 'when the row expires; infinity: never';
COMMENT ON COLUMN idempotency.key.status IS 'stored status, negative for a final failure; NULL for an inbox record and for a lease';
COMMENT ON COLUMN idempotency.key.scope IS 'the boundary inside which the key is unique';
COMMENT ON COLUMN idempotency.key.key IS 'the key';
COMMENT ON COLUMN idempotency.key.fingerprint IS 'SHA-256 of the canonical request';
COMMENT ON COLUMN idempotency.key.headers IS 'stored headers';
COMMENT ON COLUMN idempotency.key.response IS 'stored response';
COMMENT ON COLUMN idempotency.key.token IS 'fencing token of the last owner; NULL: the operation is finished';
COMMENT ON COLUMN idempotency.key.attempt IS 'number of owners that the operation has had';
COMMENT ON COLUMN idempotency.key.leased_at IS 'when the lease began or was last renewed';
COMMENT ON COLUMN idempotency.key.leased_until IS 'when the lease ends; -infinity: it was released';
COMMENT ON COLUMN idempotency.key.recovery_point IS 'the last checkpoint';
COMMENT ON COLUMN idempotency.key.recovery_state IS 'the state at the last checkpoint';
COMMENT ON COLUMN idempotency.key.request IS 'the request';
COMMENT ON COLUMN idempotency.key.retention IS 'how long the outcome will be retained; NULL: forever';
COMMENT ON COLUMN idempotency.key.finished_by IS 'token of the owner that finished the operation; NULL: it had no lease';
COMMENT ON INDEX idempotency.key_pkey IS 'decides which claim succeeds';

-- Finds abandoned operations, oldest token first: an operation that fails repeatedly gets a
-- new token each time and does not block the others.  A heartbeat or a checkpoint changes
-- no column of the index, so neither writes to an index.  Storing the outcome does, once:
-- it removes the row from this index.
CREATE INDEX key_abandoned ON idempotency.key (scope, token) WHERE token IS NOT NULL;
COMMENT ON INDEX idempotency.key_abandoned IS 'leases in progress, oldest token first';

-- One sequence for all keys: a token never repeats, even after its key is deleted.
CREATE SEQUENCE idempotency.token AS bigint NO CYCLE;
SELECT pg_catalog.pg_extension_config_dump('idempotency.token', '');
COMMENT ON SEQUENCE idempotency.token IS 'fencing tokens of leases';

-- Joined with a row of no columns, which costs nothing, a view cannot be updated: its rows are
-- changed by functions only, under the locks that these take.
CREATE VIEW idempotency.keys AS
	SELECT
		k.scope,
		k.key,
		CASE
			WHEN k.expires_at OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp() THEN 'expired'
			WHEN k.token IS NOT NULL AND k.leased_until OPERATOR(pg_catalog.=) '-infinity' THEN 'released'
			WHEN k.token IS NOT NULL
				AND pg_catalog.clock_timestamp() OPERATOR(pg_catalog.<=) k.leased_until
				AND pg_catalog.clock_timestamp() OPERATOR(pg_catalog.>=) k.leased_at THEN 'in_progress'
			WHEN k.token IS NOT NULL THEN 'abandoned'
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
		CASE WHEN pg_catalog.isfinite(k.expires_at) THEN k.expires_at END AS expires_at
	FROM idempotency.key AS k, (SELECT) AS read_only;
COMMENT ON VIEW idempotency.keys IS 'stored outcomes without their bodies, and leases';
COMMENT ON COLUMN idempotency.keys.scope IS 'the boundary inside which the key is unique';
COMMENT ON COLUMN idempotency.keys.key IS 'the key';
COMMENT ON COLUMN idempotency.keys.state IS 'completed, failed, seen (an inbox record), in_progress, abandoned, released or expired';
COMMENT ON COLUMN idempotency.keys.status IS 'stored status';
COMMENT ON COLUMN idempotency.keys.age IS 'time since the outcome was stored, or the operation first leased';
COMMENT ON COLUMN idempotency.keys.expires_in IS 'time until the key expires; NULL: never';
COMMENT ON COLUMN idempotency.keys.response_size IS 'size of the response as stored (compressed)';
COMMENT ON COLUMN idempotency.keys.fingerprint IS 'fingerprint of the request, in hex';
COMMENT ON COLUMN idempotency.keys.created_at IS 'when the outcome was stored, or the operation first leased; it never changes';
COMMENT ON COLUMN idempotency.keys.expires_at IS 'when the key expires; NULL: never';

CREATE VIEW idempotency.zombies AS
	SELECT
		k.scope,
		k.key,
		k.attempt,
		k.recovery_point,
		pg_catalog.date_trunc('second', now.now OPERATOR(pg_catalog.-) k.created_at) AS age,
		pg_catalog.date_trunc('second', now.now OPERATOR(pg_catalog.-) k.leased_until) AS overdue,
		CASE
			WHEN pg_catalog.isfinite(k.expires_at)
			THEN pg_catalog.date_trunc('second', k.expires_at OPERATOR(pg_catalog.-) now.now)
		END AS expires_in,
		k.leased_until
	FROM idempotency.key AS k, pg_catalog.clock_timestamp() AS now (now)
	WHERE k.token IS NOT NULL
		AND k.leased_until OPERATOR(pg_catalog.<>) '-infinity'
		AND (now.now OPERATOR(pg_catalog.>) k.leased_until OR now.now OPERATOR(pg_catalog.<) k.leased_at)
		AND k.expires_at OPERATOR(pg_catalog.>) now.now;
COMMENT ON VIEW idempotency.zombies IS 'operations whose lease expired and that no other owner has taken over';
COMMENT ON COLUMN idempotency.zombies.scope IS 'the boundary inside which the key is unique';
COMMENT ON COLUMN idempotency.zombies.key IS 'the key';
COMMENT ON COLUMN idempotency.zombies.attempt IS 'number of owners that the operation has had';
COMMENT ON COLUMN idempotency.zombies.recovery_point IS 'the last checkpoint';
COMMENT ON COLUMN idempotency.zombies.age IS 'time since the operation was first claimed';
COMMENT ON COLUMN idempotency.zombies.overdue IS 'time since the lease expired; negative if the clock was set back';
COMMENT ON COLUMN idempotency.zombies.expires_in IS 'time until the key expires; NULL: never';
COMMENT ON COLUMN idempotency.zombies.leased_until IS 'when the lease expired';

-- The planner support function of every function that writes.
CREATE FUNCTION idempotency_internal.single_evaluation(internal)
	RETURNS internal
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_single_evaluation';
COMMENT ON FUNCTION idempotency_internal.single_evaluation(internal) IS
	'planner support: refuse a call that the server might not run once for each row';

CREATE FUNCTION idempotency.claim(
	scope idempotency.identifier, key idempotency.identifier, request idempotency.document DEFAULT NULL,
	lease interval DEFAULT NULL, wait interval DEFAULT NULL, retention interval DEFAULT NULL,
	fingerprint bytea DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_claim';
COMMENT ON FUNCTION idempotency.claim(idempotency.identifier, idempotency.identifier, idempotency.document, interval, interval, interval, bytea) IS
	'claim an operation, or replay its outcome; any other outcome is an error';

CREATE FUNCTION idempotency.try_claim(
	scope idempotency.identifier, key idempotency.identifier, request idempotency.document DEFAULT NULL,
	lease interval DEFAULT NULL, wait interval DEFAULT NULL, retention interval DEFAULT NULL,
	fingerprint bytea DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_try_claim';
COMMENT ON FUNCTION idempotency.try_claim(idempotency.identifier, idempotency.identifier, idempotency.document, interval, interval, interval, bytea) IS
	'claim an operation, or return why that failed; check the outcome';

CREATE FUNCTION idempotency.complete(
	scope idempotency.identifier, key idempotency.identifier, response idempotency.document DEFAULT NULL,
	status integer DEFAULT 200, headers idempotency.document DEFAULT NULL,
	token bigint DEFAULT NULL, retention interval DEFAULT NULL,
	omit_large boolean DEFAULT false)
	RETURNS json
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_complete';
COMMENT ON FUNCTION idempotency.complete(idempotency.identifier, idempotency.identifier, idempotency.document, integer, idempotency.document, bigint, interval, boolean) IS
	'store the success of a claimed operation, and return its response';

CREATE FUNCTION idempotency.fail(
	scope idempotency.identifier, key idempotency.identifier, response idempotency.document,
	status integer, headers idempotency.document DEFAULT NULL,
	token bigint DEFAULT NULL, retention interval DEFAULT NULL,
	omit_large boolean DEFAULT false)
	RETURNS json
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_fail';
COMMENT ON FUNCTION idempotency.fail(idempotency.identifier, idempotency.identifier, idempotency.document, integer, idempotency.document, bigint, interval, boolean) IS
	'store the final failure of a claimed operation, and return its response';

CREATE FUNCTION idempotency.release(scope idempotency.identifier, key idempotency.identifier, token bigint DEFAULT NULL)
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_release';
COMMENT ON FUNCTION idempotency.release(idempotency.identifier, idempotency.identifier, bigint) IS
	'release a claim without an outcome';

CREATE FUNCTION idempotency.renew(scope idempotency.identifier, key idempotency.identifier, token bigint, lease interval)
	RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_renew';
COMMENT ON FUNCTION idempotency.renew(idempotency.identifier, idempotency.identifier, bigint, interval) IS
	'restart a lease from now (heartbeat); returns when it ends';

CREATE FUNCTION idempotency.checkpoint(
	scope idempotency.identifier, key idempotency.identifier, token bigint, recovery_point text,
	state idempotency.document DEFAULT NULL)
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_checkpoint';
COMMENT ON FUNCTION idempotency.checkpoint(idempotency.identifier, idempotency.identifier, bigint, text, idempotency.document) IS
	'store a recovery point, from which the next owner continues';

CREATE FUNCTION idempotency.claim_abandoned(scope idempotency.identifier, lease interval, max integer DEFAULT 1)
	RETURNS SETOF idempotency.abandoned
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_claim_abandoned';
COMMENT ON FUNCTION idempotency.claim_abandoned(idempotency.identifier, interval, integer) IS
	'take over abandoned operations, oldest token first';

CREATE FUNCTION idempotency.run(
	scope idempotency.identifier, key idempotency.identifier, request idempotency.document, handler regprocedure,
	wait interval DEFAULT NULL, retention interval DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_run';
COMMENT ON FUNCTION idempotency.run(idempotency.identifier, idempotency.identifier, idempotency.document, regprocedure, interval, interval) IS
	'claim, call the handler, and complete; or replay';

CREATE FUNCTION idempotency.peek(scope idempotency.identifier, key idempotency.identifier)
	RETURNS idempotency.operation
	LANGUAGE C STABLE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_peek';
COMMENT ON FUNCTION idempotency.peek(idempotency.identifier, idempotency.identifier) IS
	'read a stored outcome; NULL if there is none';

CREATE FUNCTION idempotency.forget(scope idempotency.identifier, key idempotency.identifier)
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_forget';
COMMENT ON FUNCTION idempotency.forget(idempotency.identifier, idempotency.identifier) IS
	'delete a stored outcome; true if there was one';

CREATE FUNCTION idempotency.once(scope idempotency.identifier, key idempotency.identifier, retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_once';
COMMENT ON FUNCTION idempotency.once(idempotency.identifier, idempotency.identifier, interval) IS
	'record a message; true the first time';

CREATE FUNCTION idempotency.once_many(scope idempotency.identifier, keys idempotency.identifier[], retention interval DEFAULT NULL)
	RETURNS SETOF text
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_once_many';
COMMENT ON FUNCTION idempotency.once_many(idempotency.identifier, idempotency.identifier[], interval) IS
	'record many messages; returns those recorded for the first time';

-- ---------------------------------------------------------------------------
-- The guard: refuses writes from a transaction without a claim
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.require_claim()
	RETURNS trigger
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_require_claim';
COMMENT ON FUNCTION idempotency.require_claim() IS
	'trigger: refuse a write from a transaction without a claim in the scope';

CREATE FUNCTION idempotency.check_commit()
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_check_commit';
COMMENT ON FUNCTION idempotency.check_commit() IS
	'raise what COMMIT would raise now';

CREATE FUNCTION idempotency.current_key(scope idempotency.identifier)
	RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_current_key';
COMMENT ON FUNCTION idempotency.current_key(idempotency.identifier) IS
	'the key that this transaction claimed last in the scope';

-- ---------------------------------------------------------------------------
-- The outbox: events that commit with the data
-- ---------------------------------------------------------------------------

-- An append-only log.  The columns from id to payload are those of Debezium's outbox event
-- router.  seq is the order.  It comes from a sequence whose cache must stay 1: delivery
-- would pass a number that a session keeps for later.  Only seq is indexed, since delivery
-- reads by nothing else.
CREATE TABLE idempotency.outbox (
	seq bigint NOT NULL,
	txid xid8 NOT NULL,
	published_at timestamptz NOT NULL,
	id uuid NOT NULL,
	aggregatetype text COLLATE "C" NOT NULL,
	aggregateid text COLLATE "C",
	type text COLLATE "C",
	payload json,
	headers json,
	PRIMARY KEY (seq)
)
-- As for idempotency.key.
WITH (
	autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = false,
	toast.autovacuum_vacuum_scale_factor = 0.1, toast.vacuum_truncate = false
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox', '');
COMMENT ON TABLE idempotency.outbox IS 'published events; only publish() writes them';
COMMENT ON COLUMN idempotency.outbox.seq IS 'the order in which the events were published';
COMMENT ON COLUMN idempotency.outbox.txid IS 'the transaction that published the event';
COMMENT ON COLUMN idempotency.outbox.published_at IS 'when publish() was called';
COMMENT ON COLUMN idempotency.outbox.id IS 'the event''s id, by which consumers deduplicate';
COMMENT ON COLUMN idempotency.outbox.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.outbox.aggregateid IS 'the object of the event; events of one aggregate keep their order';
COMMENT ON COLUMN idempotency.outbox.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.outbox.payload IS 'the payload, byte for byte';
COMMENT ON COLUMN idempotency.outbox.headers IS 'metadata; scope and key of the claim under which the event was published';
COMMENT ON INDEX idempotency.outbox_pkey IS 'the order in which delivery reads';

-- An event does not change: a subscription that has passed its number would miss the
-- change, or receive the event twice.  The trigger is a statement trigger for UPDATE
-- alone, which also covers MERGE and ON CONFLICT DO UPDATE.  COPY, by which a dump is
-- restored, and logical replication do not fire it.
CREATE FUNCTION idempotency_internal.refuse_update()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RAISE EXCEPTION USING
		ERRCODE = 'feature_not_supported',
		MESSAGE = 'cannot update table "idempotency.outbox"',
		DETAIL = 'Published events do not change.',
		HINT = 'Publish another event with idempotency.publish().';
END
$$;
COMMENT ON FUNCTION idempotency_internal.refuse_update() IS
	'trigger: refuse an UPDATE of the outbox';

CREATE TRIGGER refuse_update BEFORE UPDATE ON idempotency.outbox
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.refuse_update();
COMMENT ON TRIGGER refuse_update ON idempotency.outbox IS 'published events do not change';

CREATE SEQUENCE idempotency.outbox_seq AS bigint NO CYCLE CACHE 1;
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox_seq', '');
COMMENT ON SEQUENCE idempotency.outbox_seq IS 'numbers of events; the cache must stay 1';

-- handler is the text of a signature, since pg_upgrade does not support columns of type
-- regprocedure.  owner is a name, since a dump can be restored before its roles exist.
CREATE TABLE idempotency.subscription (
	subscription text COLLATE "C" NOT NULL,
	number bigint NOT NULL,
	owner name NOT NULL,
	topics text[] COLLATE "C" NOT NULL,
	handler text,
	max_attempts integer NOT NULL,
	retry_delay interval NOT NULL,
	max_retry_delay interval NOT NULL,
	max_lag interval,
	created_at timestamptz NOT NULL,
	last_error text,
	last_error_at timestamptz,
	PRIMARY KEY (subscription),
	UNIQUE (number)
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.subscription', '');
COMMENT ON TABLE idempotency.subscription IS 'subscriptions and their options';
COMMENT ON COLUMN idempotency.subscription.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.subscription.number IS 'the number by which workers identify the subscription';
COMMENT ON COLUMN idempotency.subscription.owner IS 'the role whose members can read the subscription, and as which the handler runs';
COMMENT ON COLUMN idempotency.subscription.topics IS 'patterns of topics';
COMMENT ON COLUMN idempotency.subscription.handler IS 'the function that workers call with each event; NULL: consumers use fetch()';
COMMENT ON COLUMN idempotency.subscription.max_attempts IS 'number of failures after which an event becomes a dead letter';
COMMENT ON COLUMN idempotency.subscription.retry_delay IS 'delay of the first retry';
COMMENT ON COLUMN idempotency.subscription.max_retry_delay IS 'longest delay of a retry';
COMMENT ON COLUMN idempotency.subscription.max_lag IS 'age at which an undelivered event is dropped; NULL: never';
COMMENT ON COLUMN idempotency.subscription.created_at IS 'when the subscription was created';
COMMENT ON COLUMN idempotency.subscription.last_error IS 'the last error that prevented a call of the handler';
COMMENT ON COLUMN idempotency.subscription.last_error_at IS 'when that error occurred';
COMMENT ON INDEX idempotency.subscription_pkey IS 'one row per subscription';
COMMENT ON INDEX idempotency.subscription_number_key IS 'for lookups by workers';

CREATE SEQUENCE idempotency.subscription_number AS bigint NO CYCLE;
SELECT pg_catalog.pg_extension_config_dump('idempotency.subscription_number', '');
COMMENT ON SEQUENCE idempotency.subscription_number IS 'numbers of subscriptions';

-- The position of each subscription: one row, with a greater version after each change.
-- The version is part of the index, and readers take the greatest, so that dead row
-- versions that an old snapshot keeps do not slow readers down.
CREATE TABLE idempotency.position (
	subscription text COLLATE "C" NOT NULL,
	version bigint NOT NULL,
	passed bigint NOT NULL,
	inflight bigint[] NOT NULL,
	batch bigint,
	batch_passed bigint,
	batch_inflight bigint[],
	batch_parked bigint[],
	leased_at timestamptz,
	leased_until timestamptz,
	singles integer NOT NULL,
	system_identifier bigint NOT NULL,
	relation oid NOT NULL,
	PRIMARY KEY (subscription, version)
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.position', '');
COMMENT ON TABLE idempotency.position IS 'the position of each subscription in the outbox';
COMMENT ON COLUMN idempotency.position.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.position.version IS 'increases with each change';
COMMENT ON COLUMN idempotency.position.passed IS 'events up to this number were delivered, or are listed in inflight';
COMMENT ON COLUMN idempotency.position.inflight IS 'triples (transaction, from, upto) of numbers that were not visible yet';
COMMENT ON COLUMN idempotency.position.batch IS 'the leased batch; NULL: none';
COMMENT ON COLUMN idempotency.position.batch_passed IS 'the position after the batch';
COMMENT ON COLUMN idempotency.position.batch_inflight IS 'numbers that were not visible when the batch was built';
COMMENT ON COLUMN idempotency.position.batch_parked IS 'the parked events in the batch';
COMMENT ON COLUMN idempotency.position.leased_at IS 'when the batch was leased';
COMMENT ON COLUMN idempotency.position.leased_until IS 'when the lease ends';
COMMENT ON COLUMN idempotency.position.singles IS 'number of events that the worker must handle one by one';
COMMENT ON COLUMN idempotency.position.system_identifier IS 'the cluster to which the transactions belong';
COMMENT ON COLUMN idempotency.position.relation IS 'OID of the outbox in that cluster';
COMMENT ON INDEX idempotency.position_pkey IS 'for reading the newest version';

-- Copies of events that failed, so that the reaper can delete the originals.  An event that
-- an earlier one of its aggregate blocks has no retry_at.
CREATE TABLE idempotency.parked (
	subscription text COLLATE "C" NOT NULL,
	seq bigint NOT NULL,
	published_at timestamptz NOT NULL,
	id uuid NOT NULL,
	aggregatetype text COLLATE "C" NOT NULL,
	aggregateid text COLLATE "C",
	type text COLLATE "C",
	payload json,
	headers json,
	attempts integer NOT NULL,
	error text,
	first_failed_at timestamptz,
	last_failed_at timestamptz,
	retry_at timestamptz,
	dead_at timestamptz,
	PRIMARY KEY (subscription, seq)
)
WITH (autovacuum_vacuum_scale_factor = 0.1);
SELECT pg_catalog.pg_extension_config_dump('idempotency.parked', '');
COMMENT ON TABLE idempotency.parked IS 'events to retry, events that they block, and dead letters';
COMMENT ON COLUMN idempotency.parked.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.parked.seq IS 'the event''s number in the outbox';
COMMENT ON COLUMN idempotency.parked.published_at IS 'when the event was published';
COMMENT ON COLUMN idempotency.parked.id IS 'the event''s id';
COMMENT ON COLUMN idempotency.parked.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.parked.aggregateid IS 'the object of the event';
COMMENT ON COLUMN idempotency.parked.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.parked.payload IS 'the payload';
COMMENT ON COLUMN idempotency.parked.headers IS 'metadata';
COMMENT ON COLUMN idempotency.parked.attempts IS 'number of failures';
COMMENT ON COLUMN idempotency.parked.error IS 'the last error';
COMMENT ON COLUMN idempotency.parked.first_failed_at IS 'when the event first failed';
COMMENT ON COLUMN idempotency.parked.last_failed_at IS 'when the event last failed';
COMMENT ON COLUMN idempotency.parked.retry_at IS 'when the event is retried; NULL: an earlier event blocks it, or it is a dead letter';
COMMENT ON COLUMN idempotency.parked.dead_at IS 'when the event became a dead letter';
COMMENT ON INDEX idempotency.parked_pkey IS 'one row per event';

CREATE INDEX parked_due ON idempotency.parked (subscription, retry_at, seq) WHERE retry_at IS NOT NULL;
COMMENT ON INDEX idempotency.parked_due IS 'events to retry, by time';
CREATE INDEX parked_aggregate ON idempotency.parked (subscription, aggregateid, seq) WHERE dead_at IS NULL;
COMMENT ON INDEX idempotency.parked_aggregate IS 'events that block later events of their aggregate';
CREATE INDEX parked_retry ON idempotency.parked (subscription, aggregateid, seq) WHERE retry_at IS NOT NULL;
COMMENT ON INDEX idempotency.parked_retry IS 'events to retry, by aggregate';

-- An event as fetch() returns it and handlers receive it.
CREATE TYPE idempotency.event AS (
	batch bigint,
	seq bigint,
	id uuid,
	aggregatetype text,
	aggregateid text,
	type text,
	payload json,
	headers json,
	attempt integer,
	published_at timestamptz
);
COMMENT ON TYPE idempotency.event IS 'an event as it is delivered';
COMMENT ON COLUMN idempotency.event.batch IS 'the batch of the event, for ack()';
COMMENT ON COLUMN idempotency.event.seq IS 'the order in which the events were published';
COMMENT ON COLUMN idempotency.event.id IS 'the event''s id, the same in each delivery';
COMMENT ON COLUMN idempotency.event.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.event.aggregateid IS 'the object of the event';
COMMENT ON COLUMN idempotency.event.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.event.payload IS 'the payload, byte for byte';
COMMENT ON COLUMN idempotency.event.headers IS 'metadata';
COMMENT ON COLUMN idempotency.event.attempt IS '1 for the first delivery, plus 1 for each reported failure';
COMMENT ON COLUMN idempotency.event.published_at IS 'when the event was published';

CREATE FUNCTION idempotency.publish(
	topic text, payload idempotency.document, aggregate_id idempotency.identifier DEFAULT NULL,
	type text DEFAULT NULL, headers idempotency.document DEFAULT NULL,
	event_id uuid DEFAULT NULL)
	RETURNS uuid
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_publish';
COMMENT ON FUNCTION idempotency.publish(text, idempotency.document, idempotency.identifier, text, idempotency.document, uuid) IS
	'publish an event when this transaction commits; returns the event''s id';

CREATE FUNCTION idempotency.subscribe(
	subscription text, topics text[], handler regprocedure DEFAULT NULL,
	start_at text DEFAULT 'now', max_attempts integer DEFAULT 10,
	retry_delay interval DEFAULT '1 second', max_retry_delay interval DEFAULT '1 hour',
	max_lag interval DEFAULT NULL, owner regrole DEFAULT NULL)
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_subscribe';
COMMENT ON FUNCTION idempotency.subscribe(text, text[], regprocedure, text, integer, interval, interval, interval, regrole) IS
	'create a subscription, or change its options; true if it is new';

CREATE FUNCTION idempotency.unsubscribe(subscription text)
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_unsubscribe';
COMMENT ON FUNCTION idempotency.unsubscribe(text) IS
	'delete a subscription and its parked events; true if there was one';

CREATE FUNCTION idempotency.fetch(
	subscription text, max_events integer DEFAULT 100,
	wait interval DEFAULT '0', lease interval DEFAULT '30 seconds')
	RETURNS SETOF idempotency.event
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000 ROWS 100
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_fetch';
COMMENT ON FUNCTION idempotency.fetch(text, integer, interval, interval) IS
	'get the next batch of events';

CREATE FUNCTION idempotency.ack(subscription text, batch bigint)
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_ack';
COMMENT ON FUNCTION idempotency.ack(text, bigint) IS
	'acknowledge a batch';

CREATE FUNCTION idempotency.nack(
	subscription text, batch bigint, event_id uuid, error text DEFAULT NULL,
	retry_in interval DEFAULT NULL)
	RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_nack';
COMMENT ON FUNCTION idempotency.nack(text, bigint, uuid, text, interval) IS
	'report that an event of the batch failed; returns when it is retried, NULL if never';

CREATE FUNCTION idempotency.extend(subscription text, batch bigint, lease interval)
	RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_extend';
COMMENT ON FUNCTION idempotency.extend(text, bigint, interval) IS
	'extend the lease of a batch; returns when it ends';

CREATE FUNCTION idempotency.redrive(subscription text, event_id uuid DEFAULT NULL)
	RETURNS bigint
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_redrive';
COMMENT ON FUNCTION idempotency.redrive(text, uuid) IS
	'deliver one dead letter again, or all of them; returns their number';

CREATE VIEW idempotency.dead_letters AS
	SELECT
		p.subscription,
		p.id AS event_id,
		p.aggregatetype AS topic,
		p.aggregateid AS aggregate_id,
		p.type,
		p.error,
		p.attempts,
		p.first_failed_at,
		p.last_failed_at,
		p.published_at,
		p.payload,
		p.headers,
		p.seq
	FROM idempotency.parked AS p, (SELECT) AS read_only
	WHERE p.dead_at IS NOT NULL;
COMMENT ON VIEW idempotency.dead_letters IS 'events that are no longer retried; redrive() delivers them again';
COMMENT ON COLUMN idempotency.dead_letters.subscription IS 'the subscription in which the event failed';
COMMENT ON COLUMN idempotency.dead_letters.event_id IS 'the event''s id';
COMMENT ON COLUMN idempotency.dead_letters.topic IS 'the topic';
COMMENT ON COLUMN idempotency.dead_letters.aggregate_id IS 'the object of the event';
COMMENT ON COLUMN idempotency.dead_letters.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.dead_letters.error IS 'the last error';
COMMENT ON COLUMN idempotency.dead_letters.attempts IS 'number of failures';
COMMENT ON COLUMN idempotency.dead_letters.first_failed_at IS 'when the event first failed';
COMMENT ON COLUMN idempotency.dead_letters.last_failed_at IS 'when the event last failed';
COMMENT ON COLUMN idempotency.dead_letters.published_at IS 'when the event was published';
COMMENT ON COLUMN idempotency.dead_letters.payload IS 'the payload';
COMMENT ON COLUMN idempotency.dead_letters.headers IS 'metadata';
COMMENT ON COLUMN idempotency.dead_letters.seq IS 'the event''s number in the outbox';

-- The progress of each subscription.  In one snapshot, a visible event was delivered unless
-- its number is greater than the position, or a triple in inflight contains it, by its
-- transaction or by its number.  (In outbox/cursor.c, 2^62 marks a transaction that has
-- ended.)  The numbers of a triple are not read while its transaction is in progress, nor if
-- it aborted: none of its events is visible.  lag_events is a difference of numbers, which
-- the index gives without counting events.
-- An open or aborted transaction can leave a million rows that no snapshot shows.  They are
-- read once, not once per subscription: each subscription reads from its own position to the
-- next one's, and takes the result of the next one if it finds nothing.
CREATE VIEW idempotency.subscriptions AS
	WITH current_position AS MATERIALIZED (
		SELECT
			s.subscription,
			p.*
		FROM idempotency.subscription AS s
		CROSS JOIN LATERAL (
			SELECT
				n.passed,
				n.inflight,
				n.leased_at,
				n.leased_until,
				n.system_identifier OPERATOR(pg_catalog.=) c.system_identifier
					AND n.relation OPERATOR(pg_catalog.=) 'idempotency.outbox'::regclass::oid AS is_local
			FROM idempotency.position AS n, pg_catalog.pg_control_system() AS c
			WHERE n.subscription OPERATOR(pg_catalog.=) s.subscription
			ORDER BY n.version DESC
			LIMIT 1
		) AS p
	),
	newest AS MATERIALIZED (
		SELECT o.seq FROM idempotency.outbox AS o
		ORDER BY o.seq DESC
		LIMIT 1
	),
	unread AS MATERIALIZED (
		SELECT
			p.subscription,
			p.passed,
			LEAST(newest.seq, pg_catalog.lead(p.passed) OVER (ORDER BY p.passed, p.subscription)) AS upto,
			newest.seq AS last
		FROM current_position AS p
		CROSS JOIN newest
	),
	behind AS MATERIALIZED (
		SELECT
			b.subscription,
			b.last,
			pg_catalog.min(e.seq) OVER (ORDER BY b.passed DESC, b.subscription DESC) AS first
		FROM unread AS b
		LEFT JOIN LATERAL (
			SELECT o.seq FROM idempotency.outbox AS o
			WHERE o.seq OPERATOR(pg_catalog.>) b.passed AND o.seq OPERATOR(pg_catalog.<=) b.upto
			ORDER BY o.seq
			LIMIT 1
		) AS e ON true
	)
	SELECT
		s.subscription,
		pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) LEAST(first.published_at, pending.oldest)) AS lag,
		CASE
			WHEN behind.first IS NOT NULL
			THEN behind.last OPERATOR(pg_catalog.-) behind.first OPERATOR(pg_catalog.+) 1
			WHEN pending.oldest IS NOT NULL THEN 1
			WHEN p.passed IS NOT NULL THEN 0
		END AS lag_events,
		k.parked,
		k.waiting,
		k.dead,
		CASE
			WHEN e.error IS NULL OR pg_catalog.has_table_privilege('idempotency.dead_letters', 'SELECT')
			THEN e.error
			ELSE '<insufficient privilege>'
		END AS last_error,
		e.at AS last_error_at,
		LEAST(first.published_at, pending.oldest) AS behind_since,
		k.oldest_parked_at,
		p.leased_at AS batch_leased_at,
		p.leased_until AS batch_leased_until,
		s.owner,
		s.topics,
		s.handler,
		s.max_lag,
		s.created_at
	FROM idempotency.subscription AS s
	LEFT JOIN current_position AS p ON p.subscription OPERATOR(pg_catalog.=) s.subscription
	LEFT JOIN behind ON behind.subscription OPERATOR(pg_catalog.=) s.subscription
	LEFT JOIN LATERAL (
		SELECT o.published_at FROM idempotency.outbox AS o
		WHERE o.seq OPERATOR(pg_catalog.=) behind.first
		LIMIT 1
	) AS first ON true
	LEFT JOIN LATERAL (
		SELECT pg_catalog.min(e.published_at) AS oldest
		FROM pg_catalog.generate_subscripts(p.inflight, 1) AS i
		CROSS JOIN LATERAL (
			SELECT
				p.inflight[i] OPERATOR(pg_catalog.>) 4611686018427387904 AS ended,
				CASE
					WHEN p.inflight[i] OPERATOR(pg_catalog.>) 0
					THEN (p.inflight[i] OPERATOR(pg_catalog.&) 4611686018427387903)::text::xid8
				END AS txid
		) AS t
		CROSS JOIN LATERAL (
			SELECT o.published_at FROM idempotency.outbox AS o
			WHERE o.seq OPERATOR(pg_catalog.>=) p.inflight[i OPERATOR(pg_catalog.+) 1]
				AND o.seq OPERATOR(pg_catalog.<=) p.inflight[i OPERATOR(pg_catalog.+) 2]
				AND (t.txid IS NULL OR o.txid OPERATOR(pg_catalog.=) t.txid)
			ORDER BY o.seq
			LIMIT 1
		) AS e
		WHERE i OPERATOR(pg_catalog.%) 3 OPERATOR(pg_catalog.=) 1
			AND CASE
				WHEN t.txid IS NULL OR t.ended OR NOT p.is_local THEN true
				WHEN pg_catalog.pg_visible_in_snapshot(t.txid, pg_catalog.pg_current_snapshot())
				THEN pg_catalog.pg_xact_status(t.txid) IS DISTINCT FROM 'aborted'
				ELSE false
			END
	) AS pending ON true
	LEFT JOIN LATERAL (
		SELECT
			pg_catalog.count(*) FILTER (WHERE e.retry_at IS NOT NULL) AS parked,
			pg_catalog.count(*) FILTER (WHERE e.retry_at IS NULL AND e.dead_at IS NULL) AS waiting,
			pg_catalog.count(*) FILTER (WHERE e.dead_at IS NOT NULL) AS dead,
			pg_catalog.min(e.first_failed_at) FILTER (WHERE e.dead_at IS NULL) AS oldest_parked_at
		FROM idempotency.parked AS e
		WHERE e.subscription OPERATOR(pg_catalog.=) s.subscription
	) AS k ON true
	LEFT JOIN LATERAL (
		SELECT s.last_error AS error, s.last_error_at AS at
		WHERE s.last_error_at IS NOT NULL
		UNION ALL
		SELECT e.error, e.last_failed_at
		FROM idempotency.parked AS e
		WHERE e.subscription OPERATOR(pg_catalog.=) s.subscription AND e.last_failed_at IS NOT NULL
		ORDER BY 2 DESC
		LIMIT 1
	) AS e ON true;
COMMENT ON VIEW idempotency.subscriptions IS 'the progress of each subscription, and what delays it';
COMMENT ON COLUMN idempotency.subscriptions.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.subscriptions.lag IS 'age of the oldest event that the subscription has not passed, of any topic, in full seconds; NULL: none';
COMMENT ON COLUMN idempotency.subscriptions.lag_events IS 'numbers from the oldest event that the subscription has not passed to the newest event: an upper bound of the events, of any topic';
COMMENT ON COLUMN idempotency.subscriptions.parked IS 'events that failed and will be retried';
COMMENT ON COLUMN idempotency.subscriptions.waiting IS 'later events of the same aggregates, which are blocked';
COMMENT ON COLUMN idempotency.subscriptions.dead IS 'dead letters';
COMMENT ON COLUMN idempotency.subscriptions.last_error IS 'the last error of a parked event or dead letter, or of a call of the handler; for roles that can read dead_letters';
COMMENT ON COLUMN idempotency.subscriptions.last_error_at IS 'when that error occurred';
COMMENT ON COLUMN idempotency.subscriptions.behind_since IS 'when the oldest event that the subscription has not passed was published; NULL: none';
COMMENT ON COLUMN idempotency.subscriptions.oldest_parked_at IS 'the earliest first failure of an event that is parked or waiting';
COMMENT ON COLUMN idempotency.subscriptions.batch_leased_at IS 'when the current batch was leased; NULL: there is none';
COMMENT ON COLUMN idempotency.subscriptions.batch_leased_until IS 'when the lease of the batch ends';
COMMENT ON COLUMN idempotency.subscriptions.owner IS 'the role whose members can read the subscription, and as which the handler runs';
COMMENT ON COLUMN idempotency.subscriptions.topics IS 'patterns of topics';
COMMENT ON COLUMN idempotency.subscriptions.handler IS 'the function that workers call with each event; NULL: consumers use fetch()';
COMMENT ON COLUMN idempotency.subscriptions.max_lag IS 'age at which an undelivered event is dropped; NULL: never';
COMMENT ON COLUMN idempotency.subscriptions.created_at IS 'when the subscription was created';

-- ---------------------------------------------------------------------------
-- Counters: statistics of each database
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency_internal.stats(
	OUT datid oid, OUT claims bigint, OUT replays bigint, OUT in_progress bigint,
	OUT mismatches bigint, OUT takeovers bigint, OUT completions bigint,
	OUT failures bigint, OUT releases bigint, OUT stale_tokens bigint,
	OUT reaped bigint, OUT zombies_reaped bigint, OUT waits bigint,
	OUT wait_time interval, OUT published bigint, OUT delivered bigint,
	OUT acknowledged bigint, OUT failed bigint, OUT dead_letters bigint,
	OUT redriven bigint, OUT events_reaped bigint, OUT events_dropped bigint,
	OUT stats_reset timestamptz)
	RETURNS SETOF record
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_stats';
COMMENT ON FUNCTION idempotency_internal.stats() IS
	'the counters of the view stats, by the OID of the database';

CREATE VIEW idempotency.stats AS
	SELECT
		s.datid,
		d.datname,
		s.claims,
		s.replays,
		s.in_progress,
		s.mismatches,
		s.takeovers,
		s.completions,
		s.failures,
		s.releases,
		s.stale_tokens,
		s.reaped,
		s.zombies_reaped,
		s.waits,
		s.wait_time,
		s.published,
		s.delivered,
		s.acknowledged,
		s.failed,
		s.dead_letters,
		s.redriven,
		s.events_reaped,
		s.events_dropped,
		s.stats_reset
	FROM idempotency_internal.stats() AS s
	JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
COMMENT ON VIEW idempotency.stats IS 'counters of each database since the server started';
COMMENT ON COLUMN idempotency.stats.datid IS 'OID of the database';
COMMENT ON COLUMN idempotency.stats.datname IS 'name of the database';
COMMENT ON COLUMN idempotency.stats.claims IS 'claims that were granted for the first time';
COMMENT ON COLUMN idempotency.stats.replays IS 'claims that replayed a stored outcome';
COMMENT ON COLUMN idempotency.stats.in_progress IS 'claims that found another owner (IK409)';
COMMENT ON COLUMN idempotency.stats.mismatches IS 'claims with another request (IK422)';
COMMENT ON COLUMN idempotency.stats.takeovers IS 'claims that took over from an owner whose lease had ended';
COMMENT ON COLUMN idempotency.stats.completions IS 'operations completed';
COMMENT ON COLUMN idempotency.stats.failures IS 'operations stored as final failures';
COMMENT ON COLUMN idempotency.stats.releases IS 'claims released by release()';
COMMENT ON COLUMN idempotency.stats.stale_tokens IS 'calls without a claim (IK412), or with a token that is not the last owner''s (IK410)';
COMMENT ON COLUMN idempotency.stats.reaped IS 'expired rows that the reaper deleted, including zombies';
COMMENT ON COLUMN idempotency.stats.zombies_reaped IS 'abandoned leases among them';
COMMENT ON COLUMN idempotency.stats.waits IS 'waits for the owner of a key';
COMMENT ON COLUMN idempotency.stats.wait_time IS 'time spent in these waits';
COMMENT ON COLUMN idempotency.stats.published IS 'events published';
COMMENT ON COLUMN idempotency.stats.delivered IS 'deliveries of events to consumers and handlers, including redeliveries';
COMMENT ON COLUMN idempotency.stats.acknowledged IS 'batches acknowledged';
COMMENT ON COLUMN idempotency.stats.failed IS 'deliveries that failed (nack)';
COMMENT ON COLUMN idempotency.stats.dead_letters IS 'events that became dead letters';
COMMENT ON COLUMN idempotency.stats.redriven IS 'dead letters that redrive() returned to delivery';
COMMENT ON COLUMN idempotency.stats.events_reaped IS 'events that the reaper deleted from the outbox';
COMMENT ON COLUMN idempotency.stats.events_dropped IS 'numbers skipped because they were older than the max_lag of a subscription: an upper bound of the events';
COMMENT ON COLUMN idempotency.stats.stats_reset IS 'when the counters were last reset';

CREATE FUNCTION idempotency.stats_reset()
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_stats_reset';
COMMENT ON FUNCTION idempotency.stats_reset() IS
	'set the counters of this database to 0';

-- ---------------------------------------------------------------------------
-- The reaper: deletes expired keys and acknowledged events
-- ---------------------------------------------------------------------------

-- The progress of the reaper in the heap of idempotency.key, and its counters.  The last two
-- columns are the origin of the row: a row of another cluster or table, from a restore or
-- logical replication, is ignored.  All columns have a fixed length, so that updates can be
-- HOT.
CREATE TABLE idempotency.reaper (
	rows_reaped bigint NOT NULL,
	zombies_reaped bigint NOT NULL,
	events_reaped bigint NOT NULL DEFAULT 0,
	last_reaped_at timestamptz,
	last_reaped_rows bigint,
	expiry_block bigint NOT NULL,
	scan_block bigint NOT NULL,
	scan_started_at timestamptz NOT NULL,
	last_scan_duration interval,
	events_deleted_upto bigint NOT NULL DEFAULT 0,
	system_identifier bigint NOT NULL,
	relation oid NOT NULL,
	PRIMARY KEY (system_identifier, relation)
);
SELECT pg_catalog.pg_extension_config_dump('idempotency.reaper', '');
COMMENT ON TABLE idempotency.reaper IS 'counters and progress of the reaper';
COMMENT ON COLUMN idempotency.reaper.rows_reaped IS 'number of expired rows deleted, including zombies';
COMMENT ON COLUMN idempotency.reaper.zombies_reaped IS 'number of abandoned leases among them';
COMMENT ON COLUMN idempotency.reaper.events_reaped IS 'number of events deleted from the outbox';
COMMENT ON COLUMN idempotency.reaper.last_reaped_at IS 'when an expired row was last deleted; NULL: never';
COMMENT ON COLUMN idempotency.reaper.last_reaped_rows IS 'number of rows deleted by the last run that deleted any';
COMMENT ON COLUMN idempotency.reaper.expiry_block IS 'the block of the table where the next rows expire';
COMMENT ON COLUMN idempotency.reaper.scan_block IS 'the block that the scan of the whole table has reached';
COMMENT ON COLUMN idempotency.reaper.scan_started_at IS 'when that scan began';
COMMENT ON COLUMN idempotency.reaper.last_scan_duration IS 'how long the last complete scan took; NULL: there was none';
COMMENT ON COLUMN idempotency.reaper.events_deleted_upto IS 'every event up to this number was deleted';
COMMENT ON COLUMN idempotency.reaper.system_identifier IS 'the cluster to which the row belongs';
COMMENT ON COLUMN idempotency.reaper.relation IS 'OID of idempotency.key in that cluster';
COMMENT ON INDEX idempotency.reaper_pkey IS 'one row per cluster and key table';

CREATE FUNCTION idempotency.reap(max_rows integer DEFAULT 1000)
	RETURNS bigint
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_reap';
COMMENT ON FUNCTION idempotency.reap(integer) IS
	'delete expired rows, and events that every subscription has passed, in this transaction; returns their number';

-- ---------------------------------------------------------------------------
-- Privileges: none for PUBLIC
-- ---------------------------------------------------------------------------

-- Grants the privileges to the role, after USAGE on the schema; for the functions below.
CREATE FUNCTION idempotency_internal.grant_privileges(role regrole, VARIADIC privileges text[])
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	privilege text;
BEGIN
	IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r WHERE r.oid OPERATOR(pg_catalog.=) role) THEN
		RAISE EXCEPTION USING
			ERRCODE = 'undefined_object',
			MESSAGE = pg_catalog.format('role with OID %s does not exist', role::pg_catalog.oid),
			HINT = 'Pass the name of a role.';
	END IF;
	EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA idempotency TO %s', role);
	FOREACH privilege IN ARRAY privileges LOOP
		EXECUTE pg_catalog.format('GRANT %s TO %s', privilege, role);
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.grant_privileges(regrole, text[]) IS
	'grant privileges on objects of the extension to a role';

-- Four sets of privileges.  Clients claim, finish and publish.  Consumers deduplicate and
-- read events, including those of other roles.  Operators read keys and delete them.  Backups read all tables.
-- A cast of a constant through I/O functions needs EXECUTE on them.
CREATE FUNCTION idempotency.grant_client(role regrole)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'USAGE ON TYPE idempotency.identifier, idempotency.document, idempotency.outcome,
			idempotency.operation, idempotency.abandoned',
		'EXECUTE ON FUNCTION
			idempotency_internal.identifier_in, idempotency_internal.identifier,
			idempotency_internal.document(jsonb), idempotency_internal.document_to_json,
			idempotency_internal.document_in, idempotency_internal.document_out,
			idempotency.claim, idempotency.try_claim, idempotency.complete, idempotency.fail,
			idempotency.release, idempotency.renew, idempotency.checkpoint,
			idempotency.claim_abandoned, idempotency.run, idempotency.peek, idempotency.current_key,
			idempotency.require_claim, idempotency.check_commit, idempotency.publish,
			idempotency.once, idempotency.once_many,
			idempotency.canonical, idempotency.fingerprint(idempotency.document),
			idempotency.fingerprint(text, text, idempotency.document),
			idempotency.derive_key, idempotency.natural_key, idempotency.stable_text, idempotency.uuidv7,
			idempotency.parse_header,
			idempotency.problem(idempotency.operation), idempotency.problem(text),
			idempotency.problem_headers(idempotency.operation), idempotency.problem_headers(text)')
$$;
COMMENT ON FUNCTION idempotency.grant_client(regrole) IS
	'let a role claim, complete and replay';

CREATE FUNCTION idempotency.grant_consumer(role regrole)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'USAGE ON TYPE idempotency.identifier, idempotency.event',
		'EXECUTE ON FUNCTION
			idempotency.subscribe, idempotency.unsubscribe, idempotency.fetch,
			idempotency.ack, idempotency.nack, idempotency.extend, idempotency.redrive,
			idempotency.once, idempotency.once_many,
			idempotency_internal.identifier_in, idempotency_internal.identifier')
$$;
COMMENT ON FUNCTION idempotency.grant_consumer(regrole) IS
	'let a role subscribe to events and read them';

CREATE FUNCTION idempotency.grant_operator(role regrole)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'USAGE ON TYPE idempotency.identifier, idempotency.document, idempotency.outcome,
			idempotency.operation',
		'SELECT ON idempotency.keys, idempotency.zombies, idempotency.stats, idempotency.reaper,
			idempotency.subscriptions, idempotency.dead_letters',
		'EXECUTE ON FUNCTION
			idempotency_internal.identifier_in, idempotency_internal.identifier,
			idempotency_internal.keytext_in, idempotency_internal.keytext_out,
			idempotency_internal.keytext_lt, idempotency_internal.keytext_le,
			idempotency_internal.keytext_eq, idempotency_internal.keytext_ne,
			idempotency_internal.keytext_ge, idempotency_internal.keytext_gt,
			idempotency.peek, idempotency.forget, idempotency.reap, idempotency.redrive,
			idempotency_internal.stats(), idempotency.stats_reset')
$$;
COMMENT ON FUNCTION idempotency.grant_operator(regrole) IS
	'let a role read stored keys and delete them';

-- What pg_dump needs: it locks and copies each table, and reads each sequence.
CREATE FUNCTION idempotency.grant_backup(role regrole)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'SELECT ON idempotency.key, idempotency.outbox, idempotency.subscription, idempotency.position,
			idempotency.parked, idempotency.reaper',
		'SELECT ON SEQUENCE idempotency.token, idempotency.outbox_seq, idempotency.subscription_number')
$$;
COMMENT ON FUNCTION idempotency.grant_backup(regrole) IS
	'let a role dump the database, with all keys, responses and events';

-- The server's default privileges and those of the installing role (ALTER DEFAULT
-- PRIVILEGES) apply to each object above.  Revoke them all; only the owner keeps privileges.
-- Array types have no privileges of their own.  Default privileges do not apply to row types
-- of tables and views, and pg_dump warns about a REVOKE on one.
DO $$
DECLARE
	granted record;
BEGIN
	FOR granted IN
		SELECT DISTINCT o.kind, o.name, CASE
			WHEN a.grantee OPERATOR(pg_catalog.=) 0::pg_catalog.oid THEN 'PUBLIC'
			ELSE a.grantee::pg_catalog.regrole::pg_catalog.text
		END AS grantee
		FROM (
			SELECT 'pg_catalog.pg_namespace'::pg_catalog.regclass AS catalog, n.oid, 'SCHEMA' AS kind,
				n.oid::pg_catalog.regnamespace::pg_catalog.text AS name, n.nspowner AS owner,
				COALESCE(n.nspacl, pg_catalog.acldefault('n', n.nspowner)) AS acl
			FROM pg_catalog.pg_namespace AS n
			UNION ALL
			SELECT 'pg_catalog.pg_class'::pg_catalog.regclass, c.oid,
				CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'S' THEN 'SEQUENCE' ELSE 'TABLE' END,
				c.oid::pg_catalog.regclass::pg_catalog.text, c.relowner, c.relacl
			FROM pg_catalog.pg_class AS c
			UNION ALL
			SELECT 'pg_catalog.pg_proc'::pg_catalog.regclass, p.oid, 'ROUTINE',
				p.oid::pg_catalog.regprocedure::pg_catalog.text, p.proowner,
				COALESCE(p.proacl, pg_catalog.acldefault('f', p.proowner))
			FROM pg_catalog.pg_proc AS p
			UNION ALL
			SELECT 'pg_catalog.pg_type'::pg_catalog.regclass, t.oid, 'TYPE',
				t.oid::pg_catalog.regtype::pg_catalog.text, t.typowner,
				COALESCE(t.typacl, pg_catalog.acldefault('T', t.typowner))
			FROM pg_catalog.pg_type AS t
			LEFT JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) t.typrelid
			WHERE t.typcategory OPERATOR(pg_catalog.<>) 'A'
				AND (c.oid IS NULL OR c.relkind OPERATOR(pg_catalog.=) 'c')
		) AS o
		JOIN pg_catalog.pg_depend AS d
			ON d.classid OPERATOR(pg_catalog.=) o.catalog AND d.objid OPERATOR(pg_catalog.=) o.oid
		JOIN pg_catalog.pg_extension AS e ON e.oid OPERATOR(pg_catalog.=) d.refobjid
		CROSS JOIN LATERAL pg_catalog.aclexplode(o.acl) AS a
		WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
			AND d.deptype OPERATOR(pg_catalog.=) 'e'
			AND e.extname OPERATOR(pg_catalog.=) 'idempotency'
			AND a.grantee OPERATOR(pg_catalog.<>) o.owner
	LOOP
		EXECUTE pg_catalog.format('REVOKE ALL ON %s %s FROM %s CASCADE',
			granted.kind, granted.name, granted.grantee);
	END LOOP;
END
$$;

-- Monitoring roles read the counters and the progress of subscriptions, but no keys, no
-- events and no error texts.
GRANT USAGE ON SCHEMA idempotency TO pg_monitor;
GRANT SELECT ON idempotency.stats, idempotency.reaper, idempotency.subscriptions TO pg_monitor;
GRANT EXECUTE ON FUNCTION idempotency_internal.stats() TO pg_monitor;
