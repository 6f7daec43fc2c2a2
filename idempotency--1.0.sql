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
	retry_after integer,
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
COMMENT ON COLUMN idempotency.operation.retry_after IS 'seconds until the operation can be claimed, at least 1 while its owner holds it; as in Retry-After';
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
CREATE SEQUENCE idempotency.token AS bigint INCREMENT 131072 NO CYCLE;
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
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_release';
COMMENT ON FUNCTION idempotency.release(idempotency.identifier, idempotency.identifier, bigint) IS
	'release a claim without an outcome; true';

CREATE FUNCTION idempotency.renew(scope idempotency.identifier, key idempotency.identifier, token bigint, lease interval)
	RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_renew';
COMMENT ON FUNCTION idempotency.renew(idempotency.identifier, idempotency.identifier, bigint, interval) IS
	'restart a lease from now (heartbeat); returns when it ends';

CREATE FUNCTION idempotency.checkpoint(
	scope idempotency.identifier, key idempotency.identifier, token bigint, recovery_point text,
	state idempotency.document DEFAULT NULL)
	RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_checkpoint';
COMMENT ON FUNCTION idempotency.checkpoint(idempotency.identifier, idempotency.identifier, bigint, text, idempotency.document) IS
	'store a recovery point, from which the next owner continues; returns when the lease ends';

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
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_check_commit';
COMMENT ON FUNCTION idempotency.check_commit() IS
	'raise what COMMIT would raise now; true if nothing';

CREATE FUNCTION idempotency.current_key(scope idempotency.identifier)
	RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_current_key';
COMMENT ON FUNCTION idempotency.current_key(idempotency.identifier) IS
	'the key that this transaction claimed last in the scope';

-- ---------------------------------------------------------------------------
-- The outbox: events that commit with the data
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.publish(
	topic text, payload idempotency.document, aggregate_id idempotency.identifier DEFAULT NULL,
	type text DEFAULT NULL, headers idempotency.document DEFAULT NULL,
	event_id uuid DEFAULT NULL, deliver_at timestamptz DEFAULT NULL)
	RETURNS uuid
	LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000
	SUPPORT idempotency_internal.single_evaluation AS 'MODULE_PATHNAME', 'idempotency_publish';
COMMENT ON FUNCTION idempotency.publish(text, idempotency.document, idempotency.identifier, text, idempotency.document, uuid, timestamptz) IS
	'publish an event when this transaction commits; returns the event''s id';

-- What delivery and configure(), below, call of the library.
CREATE FUNCTION idempotency_internal.setting(name text, scope text DEFAULT '')
	RETURNS text
	LANGUAGE C STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_setting';
COMMENT ON FUNCTION idempotency_internal.setting(text, text) IS
	'the value of a setting for a scope';

CREATE FUNCTION idempotency_internal.check_setting(name text, value text)
	RETURNS void
	LANGUAGE C STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_check_setting';
COMMENT ON FUNCTION idempotency_internal.check_setting(text, text) IS
	'raise 22023 unless a setting can have a value';

CREATE FUNCTION idempotency_internal.forget_settings()
	RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_forget_settings';
COMMENT ON FUNCTION idempotency_internal.forget_settings() IS
	'let all sessions read the stored settings again';

CREATE FUNCTION idempotency_internal.check_name(what text, name text)
	RETURNS void
	LANGUAGE C STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_check_name';
COMMENT ON FUNCTION idempotency_internal.check_name(text, text) IS
	'raise IK400 for a name that cannot be used';

CREATE FUNCTION idempotency_internal.listen(topics text[])
	RETURNS void
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_listen';
COMMENT ON FUNCTION idempotency_internal.listen(text[]) IS
	'let commits that publish such topics end the next wait_for_event()';

CREATE FUNCTION idempotency_internal.wait_for_event(until timestamptz, pause double precision)
	RETURNS void
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_wait_for_event';
COMMENT ON FUNCTION idempotency_internal.wait_for_event(timestamptz, double precision) IS
	'sleep until an event was published since listen(), for a second at most; without preloading, for a pause';

CREATE FUNCTION idempotency_internal.count_events(kind text, events bigint)
	RETURNS void
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_count_events';
COMMENT ON FUNCTION idempotency_internal.count_events(text, bigint) IS
	'add to a counter of the view stats';

CREATE FUNCTION idempotency_internal.subscriptions_changed()
	RETURNS trigger
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_subscriptions_changed';
COMMENT ON FUNCTION idempotency_internal.subscriptions_changed() IS
	'trigger: after the commit, workers look at the subscriptions';

CREATE FUNCTION idempotency_internal.wake_relay(subscription text)
	RETURNS void
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_wake_relay';
COMMENT ON FUNCTION idempotency_internal.wake_relay(text) IS
	'after the commit, workers look at the subscriptions; 53400 if there is none for this one';

CREATE FUNCTION idempotency_internal.check_handler(handler text, owner name)
	RETURNS void
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_check_handler';
COMMENT ON FUNCTION idempotency_internal.check_handler(text, name) IS
	'raise an error unless background workers can call the handler for such an owner';

CREATE FUNCTION idempotency_internal.is_worker_batch(batch bigint)
	RETURNS boolean
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_is_worker_batch';
COMMENT ON FUNCTION idempotency_internal.is_worker_batch(bigint) IS
	'whether a background worker has the batch';

CREATE FUNCTION idempotency_internal.was_given_back(batch bigint)
	RETURNS boolean
	LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_was_given_back';
COMMENT ON FUNCTION idempotency_internal.was_given_back(bigint) IS
	'whether the worker that had the batch has ended without a failure of the batch';

CREATE FUNCTION idempotency_internal.is_worker_fetch()
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_is_worker_fetch';
COMMENT ON FUNCTION idempotency_internal.is_worker_fetch() IS
	'whether a background worker fetches';

CREATE FUNCTION idempotency_internal.relay_problem(subscription text)
	RETURNS text
	LANGUAGE C VOLATILE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_relay_problem';
COMMENT ON FUNCTION idempotency_internal.relay_problem(text) IS
	'why no background worker serves a subscription';

-- The parts of the folder delivery, which the portable edition has, too: change them there, and
-- run delivery/assemble.
-- delivery/assemble: begin


CREATE FUNCTION idempotency_internal.raise(code text, message text, detail text, hint text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
BEGIN
	IF hint IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message;
	ELSIF detail IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
	END IF;
	RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, DETAIL = detail, HINT = hint;
END
$$;
COMMENT ON FUNCTION idempotency_internal.raise(text, text, text, text) IS 'raise an error; the detail can be NULL, or both detail and hint';

CREATE FUNCTION idempotency_internal.raise_read_only(function text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('25006', format('cannot execute idempotency.%s() in a read-only transaction', $1), NULL, NULL)
$$;
COMMENT ON FUNCTION idempotency_internal.raise_read_only(text) IS '25006: the transaction cannot write';

CREATE FUNCTION idempotency_internal.raise_setting(name text, value text, detail text, hint text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('22023', format('invalid value for parameter "idempotency.%s": "%s"', $1, $2), $3, $4)
$$;
COMMENT ON FUNCTION idempotency_internal.raise_setting(text, text, text, text) IS '22023: the value of a setting cannot be used';

-- A duration as in postgresql.conf (a number with or without a unit), or an interval.
-- Returns NULL unless it is one.  A month counts as 31 days, so that nothing ends early.
CREATE FUNCTION idempotency_internal.duration(value text, unit text)
	RETURNS interval
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
BEGIN
	IF value ~ E'^ *[-+]\x3F[0-9.]+([eE][-+]\x3F[0-9]+)\x3F *$' THEN
		RETURN value::double precision * ('1' || unit)::interval;
	ELSIF value ~ E'^ *[-+]\x3F[0-9.]+ *(us|ms|s|min|h|d) *$' THEN
		RETURN make_interval(secs => extract(epoch FROM value::interval)::double precision);
	END IF;
	RETURN value::interval;
EXCEPTION
	WHEN data_exception THEN
		RETURN NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.duration(text, text) IS 'a duration from its text, or NULL';

-- An invalid value is the default: it only bounds a time.
CREATE FUNCTION idempotency_internal.default_wait(scope text DEFAULT '')
	RETURNS interval
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
DECLARE
	value text := idempotency_internal.setting('wait', scope);
	wait interval;
BEGIN
	IF value <> '' THEN
		wait := idempotency_internal.duration(value, 'ms');
	END IF;
	IF wait BETWEEN interval '0' AND interval '24 days' THEN
		RETURN wait;
	END IF;
	RETURN interval '5 s';
END
$$;
COMMENT ON FUNCTION idempotency_internal.default_wait(text) IS 'idempotency.wait, for a scope';

-- A length that is a mistake: a driver sent nanoseconds or milliseconds as a bare number.
CREATE FUNCTION idempotency_internal.refuse_too_long(what text, length interval, longest text)
	RETURNS void
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
	IF extract(epoch FROM length) > extract(epoch FROM longest::interval) THEN
		PERFORM idempotency_internal.raise('22023', format('%s must be at most %s', what, longest), NULL,
			format('Pass at most %s. A number without a unit is seconds: pass a unit, such as ''30 s''.', longest));
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.refuse_too_long(text, interval, text) IS '22023: a duration is too long';

CREATE FUNCTION idempotency_internal.milliseconds(wait interval)
	RETURNS integer
	LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
AS $$
DECLARE
	milliseconds numeric := ceil(extract(epoch FROM wait) * 1000);
BEGIN
	IF wait < interval '0' THEN
		PERFORM idempotency_internal.raise('22023', 'wait must not be negative', NULL,
			'Pass 0 to not wait, or NULL for idempotency.wait.');
	END IF;
	PERFORM idempotency_internal.refuse_too_long('wait', wait, '24 days');
	RETURN milliseconds;
END
$$;
COMMENT ON FUNCTION idempotency_internal.milliseconds(interval) IS 'a wait in milliseconds, rounded up';

CREATE FUNCTION idempotency_internal.check_lease(lease interval)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	now timestamptz := clock_timestamp();
BEGIN
	PERFORM idempotency_internal.refuse_too_long('lease', lease, '24 days');
	IF now + lease <= now OR NOT isfinite(now + lease) THEN
		PERFORM idempotency_internal.raise('22023', 'lease must be positive and finite', NULL,
			'Pass the time within which the owner renews the lease, such as ''30 seconds''.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_lease(interval) IS 'raise 22023 or 22008 unless a lease can be used';

-- Sets lock_timeout for a wait, in a subtransaction.  Returns false if the caller's own
-- lock_timeout is shorter, and stays.
CREATE FUNCTION idempotency_internal.bound_wait(wait_ms bigint)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	own_ms bigint := extract(epoch FROM current_setting('lock_timeout')::interval) * 1000;
BEGIN
	IF own_ms > 0 AND own_ms <= wait_ms THEN
		RETURN false;
	END IF;
	PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true); -- not distributed
	-- distributed: RETURN idempotency_internal.set_lock_timeout(greatest(wait_ms, 1)::text);
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency_internal.bound_wait(bigint) IS 'bound the waits for locks';


-- ---------------------------------------------------------------------------
-- Delivery: the outbox, subscriptions and their positions
-- ---------------------------------------------------------------------------

-- An append-only log.  The columns from aggregatetype to payload, and id, are those of
-- Debezium's outbox event router.  publish() assigns the transaction its id before it draws
-- seq, from a sequence whose cache must stay 1: the scan depends on both.  bucket is stored,
-- because a hash that another server or version computes can differ, and an aggregate must
-- not change its partition.  bytes bounds batches without reading payloads.
CREATE TABLE idempotency.outbox (
	seq bigint NOT NULL,
	txid xid8 NOT NULL,
	published_at timestamptz NOT NULL,
	id uuid NOT NULL,
	bucket integer NOT NULL,
	bytes integer NOT NULL,
	deliver_at timestamptz,
	aggregatetype text COLLATE "C" NOT NULL,
	aggregateid text COLLATE "C",
	type text COLLATE "C",
	payload json,
	headers json,
	PRIMARY KEY (seq)
)
WITH (
	autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = false,
	toast.autovacuum_vacuum_scale_factor = 0.1, toast.vacuum_truncate = false
);
COMMENT ON TABLE idempotency.outbox IS 'published events; only publish() writes them';
COMMENT ON COLUMN idempotency.outbox.seq IS 'the order in which the events were published';
COMMENT ON COLUMN idempotency.outbox.txid IS 'the transaction that published the event';
COMMENT ON COLUMN idempotency.outbox.published_at IS 'when publish() was called';
COMMENT ON COLUMN idempotency.outbox.id IS 'the event''s id, by which consumers deduplicate';
COMMENT ON COLUMN idempotency.outbox.bucket IS 'hash of the aggregate, or of the id without one; it selects the partition';
COMMENT ON COLUMN idempotency.outbox.bytes IS 'size of payload and headers';
COMMENT ON COLUMN idempotency.outbox.deliver_at IS 'the event is not delivered before; NULL: at once, in the order of its aggregate';
COMMENT ON COLUMN idempotency.outbox.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.outbox.aggregateid IS 'the object of the event; events of one aggregate keep their order';
COMMENT ON COLUMN idempotency.outbox.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.outbox.payload IS 'the payload, byte for byte';
COMMENT ON COLUMN idempotency.outbox.headers IS 'metadata; scope and key of the claim under which the event was published';
COMMENT ON INDEX idempotency.outbox_pkey IS 'the order in which delivery reads';

-- An event does not change: a subscription that has passed its number would miss the change.
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
COMMENT ON FUNCTION idempotency_internal.refuse_update() IS 'trigger: refuse an UPDATE of the outbox';
CREATE TRIGGER refuse_update BEFORE UPDATE ON idempotency.outbox
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.refuse_update();
COMMENT ON TRIGGER refuse_update ON idempotency.outbox IS 'published events do not change';

CREATE SEQUENCE idempotency.outbox_seq AS bigint NO CYCLE CACHE 1;
COMMENT ON SEQUENCE idempotency.outbox_seq IS 'numbers of events; the cache must stay 1';

-- owner and handler are names, since a dump can be restored before roles and functions exist,
-- and pg_upgrade refuses regprocedure columns.
CREATE TABLE idempotency.subscription (
	subscription text COLLATE "C" NOT NULL PRIMARY KEY,
	owner name NOT NULL,
	topics text[] COLLATE "C" NOT NULL,
	patterns text[] COLLATE "C" NOT NULL,
	handler text,
	start_at text NOT NULL,
	max_attempts integer NOT NULL,
	retry_delay interval NOT NULL,
	max_retry_delay interval NOT NULL,
	max_lag interval,
	dead_letter_retention interval,
	paused_at timestamptz,
	created_at timestamptz NOT NULL
);
COMMENT ON TABLE idempotency.subscription IS 'subscriptions and their options';
COMMENT ON COLUMN idempotency.subscription.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.subscription.owner IS 'the role whose members can use the subscription';
COMMENT ON COLUMN idempotency.subscription.topics IS 'patterns of topics';
COMMENT ON COLUMN idempotency.subscription.patterns IS 'the same patterns for LIKE';
COMMENT ON COLUMN idempotency.subscription.handler IS 'the function that deliver() calls for the owner; NULL: none';
COMMENT ON COLUMN idempotency.subscription.start_at IS 'where the subscription started: now or beginning';
COMMENT ON COLUMN idempotency.subscription.max_attempts IS 'number of failures after which an event becomes a dead letter';
COMMENT ON COLUMN idempotency.subscription.retry_delay IS 'delay of the first retry';
COMMENT ON COLUMN idempotency.subscription.max_retry_delay IS 'longest delay of a retry';
COMMENT ON COLUMN idempotency.subscription.max_lag IS 'age at which an undelivered event is dropped; NULL: never';
COMMENT ON COLUMN idempotency.subscription.dead_letter_retention IS 'age at which a dead letter is deleted; NULL: never';
COMMENT ON COLUMN idempotency.subscription.paused_at IS 'since when nothing is delivered; NULL: it is not paused';
COMMENT ON COLUMN idempotency.subscription.created_at IS 'when the subscription was created';
COMMENT ON INDEX idempotency.subscription_pkey IS 'one row per subscription';

CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON idempotency.subscription
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.subscriptions_changed();
COMMENT ON TRIGGER changed ON idempotency.subscription IS 'workers look at subscriptions that have changed';

-- A partition has the events whose bucket modulo "modulus" is "remainder".  Its row is what
-- consumers lock, and never changes but to get an end: a change of the number of partitions
-- makes a new generation that begins where the old one ends.  The number identifies a
-- partition in its batch numbers, which have ten bits for it.
CREATE TABLE idempotency.partition (
	subscription text COLLATE "C" NOT NULL,
	partition integer NOT NULL CHECK (partition BETWEEN 0 AND 1023),
	generation integer NOT NULL,
	remainder integer NOT NULL,
	modulus integer NOT NULL,
	stop pg_snapshot,
	stop_born xid8,
	stop_mark bigint,
	stop_top bigint,
	PRIMARY KEY (subscription, partition)
);
COMMENT ON TABLE idempotency.partition IS 'partitions of subscriptions; consumers lock the row of the partition that they use';
COMMENT ON COLUMN idempotency.partition.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.partition.partition IS 'the number of the partition, unique in the subscription';
COMMENT ON COLUMN idempotency.partition.generation IS 'increases with each change of the number of partitions';
COMMENT ON COLUMN idempotency.partition.remainder IS 'the partition has the buckets with this remainder';
COMMENT ON COLUMN idempotency.partition.modulus IS 'number of partitions of the generation';
COMMENT ON COLUMN idempotency.partition.stop IS 'the partition ends here, as upto of its position; NULL: it does not end';
COMMENT ON COLUMN idempotency.partition.stop_born IS 'upto_born at that end';
COMMENT ON COLUMN idempotency.partition.stop_mark IS 'upto_mark at that end';
COMMENT ON COLUMN idempotency.partition.stop_top IS 'top at that end';
COMMENT ON INDEX idempotency.partition_pkey IS 'one row per partition';

-- The position of each partition: one row, with a greater version after each change.  Readers
-- take the greatest, so that dead versions that an old snapshot keeps do not slow them down.
-- scan.sql explains the columns from base to former_top.
CREATE TABLE idempotency.position (
	subscription text COLLATE "C" NOT NULL,
	partition integer NOT NULL,
	version bigint NOT NULL,
	changed_at timestamptz NOT NULL,
	system_identifier bigint NOT NULL,
	relation oid NOT NULL,
	base pg_snapshot NOT NULL,
	born xid8 NOT NULL,
	mark bigint NOT NULL,
	top bigint NOT NULL,
	xids xid8[] NOT NULL,
	froms bigint[] NOT NULL,
	range_from bigint NOT NULL,
	upto pg_snapshot,
	upto_born xid8,
	upto_mark bigint,
	reached bigint NOT NULL,
	former_base pg_snapshot,
	former_top bigint,
	skip bigint NOT NULL,
	ended boolean NOT NULL,
	events bigint[] NOT NULL,
	size integer NOT NULL,
	retried boolean NOT NULL,
	failures integer NOT NULL,
	alone boolean NOT NULL,
	batch bigint,
	leased_at timestamptz,
	leased_until timestamptz,
	holder integer,
	acknowledged bigint NOT NULL,
	failed bigint NOT NULL,
	failing_since timestamptz,
	PRIMARY KEY (subscription, partition, version)
)
WITH (autovacuum_vacuum_scale_factor = 0.1);
ALTER TABLE idempotency.position ALTER COLUMN events SET STORAGE EXTERNAL;
COMMENT ON TABLE idempotency.position IS 'the position of each partition in the outbox, and its batch';
COMMENT ON COLUMN idempotency.position.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.position.partition IS 'the number of the partition';
COMMENT ON COLUMN idempotency.position.version IS 'increases with each change';
COMMENT ON COLUMN idempotency.position.changed_at IS 'when this version was written';
COMMENT ON COLUMN idempotency.position.system_identifier IS 'the cluster to which the transactions belong';
COMMENT ON COLUMN idempotency.position.relation IS 'OID of the outbox in that cluster';
COMMENT ON COLUMN idempotency.position.base IS 'every event that is visible in it was read';
COMMENT ON COLUMN idempotency.position.born IS 'transactions with this id or a greater one draw numbers above mark';
COMMENT ON COLUMN idempotency.position.mark IS 'the last number that was drawn before base and born';
COMMENT ON COLUMN idempotency.position.top IS 'no event that is visible in base, or in upto, has a greater number';
COMMENT ON COLUMN idempotency.position.xids IS 'transactions that were in progress in base';
COMMENT ON COLUMN idempotency.position.froms IS 'for each of them, a number below its first one';
COMMENT ON COLUMN idempotency.position.range_from IS 'the same for ids from the end of base to born';
COMMENT ON COLUMN idempotency.position.upto IS 'the snapshot whose events are being read; NULL: none';
COMMENT ON COLUMN idempotency.position.upto_born IS 'born, for upto';
COMMENT ON COLUMN idempotency.position.upto_mark IS 'mark, for upto';
COMMENT ON COLUMN idempotency.position.reached IS 'the window was read up to this number';
COMMENT ON COLUMN idempotency.position.former_base IS 'base in the cluster of a dump, whose events are being read; NULL: none';
COMMENT ON COLUMN idempotency.position.former_top IS 'top in that cluster';
COMMENT ON COLUMN idempotency.position.skip IS 'events up to this number are not delivered: seek(), or max_lag';
COMMENT ON COLUMN idempotency.position.ended IS 'the partition has read up to its end';
COMMENT ON COLUMN idempotency.position.events IS 'numbers of the events that were read and not acknowledged, in order';
COMMENT ON COLUMN idempotency.position.size IS 'how many of them are in the batch';
COMMENT ON COLUMN idempotency.position.retried IS 'whether some of them are in idempotency.parked';
COMMENT ON COLUMN idempotency.position.failures IS 'deliveries of these events that failed as a whole';
COMMENT ON COLUMN idempotency.position.alone IS 'whether they are delivered one by one';
COMMENT ON COLUMN idempotency.position.batch IS 'the number of the batch; NULL: none is out';
COMMENT ON COLUMN idempotency.position.leased_at IS 'when the batch was leased';
COMMENT ON COLUMN idempotency.position.leased_until IS 'when the lease ends';
COMMENT ON COLUMN idempotency.position.holder IS 'process id of the session that fetched the batch';
COMMENT ON COLUMN idempotency.position.acknowledged IS 'number of events acknowledged';
COMMENT ON COLUMN idempotency.position.failed IS 'number of deliveries of an event that failed';
COMMENT ON COLUMN idempotency.position.failing_since IS 'since when the log says that events fail; NULL: they do not';
COMMENT ON INDEX idempotency.position_pkey IS 'for reading the newest version';

-- Events that failed, those that wait behind them, events that are not due yet, and dead
-- letters: copies, so that the originals can be deleted.  queue is the aggregate whose order
-- the event keeps.  An event with retry_at is scheduled, one with dead_at is dead, and one
-- with neither waits for an earlier event of its queue.
CREATE TABLE idempotency.parked (
	subscription text COLLATE "C" NOT NULL,
	partition integer NOT NULL,
	seq bigint NOT NULL,
	published_at timestamptz NOT NULL,
	id uuid NOT NULL,
	bucket integer NOT NULL,
	bytes integer NOT NULL,
	queue text COLLATE "C",
	aggregatetype text COLLATE "C" NOT NULL,
	aggregateid text COLLATE "C",
	type text COLLATE "C",
	payload json,
	headers json,
	attempts integer NOT NULL,
	alone boolean NOT NULL,
	error text,
	first_failed_at timestamptz,
	last_failed_at timestamptz,
	retry_at timestamptz CHECK (retry_at IS NULL OR dead_at IS NULL),
	dead_at timestamptz,
	PRIMARY KEY (subscription, seq)
)
WITH (autovacuum_vacuum_scale_factor = 0.1);
COMMENT ON TABLE idempotency.parked IS 'events to retry, events that they block, and dead letters';
COMMENT ON COLUMN idempotency.parked.subscription IS 'the subscription';
COMMENT ON COLUMN idempotency.parked.partition IS 'the partition that delivers the event';
COMMENT ON COLUMN idempotency.parked.seq IS 'the event''s number in the outbox';
COMMENT ON COLUMN idempotency.parked.published_at IS 'when the event was published';
COMMENT ON COLUMN idempotency.parked.id IS 'the event''s id';
COMMENT ON COLUMN idempotency.parked.bucket IS 'as in the outbox';
COMMENT ON COLUMN idempotency.parked.bytes IS 'as in the outbox';
COMMENT ON COLUMN idempotency.parked.queue IS 'the aggregate whose order the event keeps; NULL: none';
COMMENT ON COLUMN idempotency.parked.aggregatetype IS 'the topic';
COMMENT ON COLUMN idempotency.parked.aggregateid IS 'the object of the event';
COMMENT ON COLUMN idempotency.parked.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.parked.payload IS 'the payload';
COMMENT ON COLUMN idempotency.parked.headers IS 'metadata';
COMMENT ON COLUMN idempotency.parked.attempts IS 'number of deliveries that failed';
COMMENT ON COLUMN idempotency.parked.alone IS 'whether a lease ended while the event was delivered alone';
COMMENT ON COLUMN idempotency.parked.error IS 'the last error';
COMMENT ON COLUMN idempotency.parked.first_failed_at IS 'when the event first failed';
COMMENT ON COLUMN idempotency.parked.last_failed_at IS 'when the event last failed';
COMMENT ON COLUMN idempotency.parked.retry_at IS 'when the event is delivered; NULL: an earlier event blocks it, or it is a dead letter';
COMMENT ON COLUMN idempotency.parked.dead_at IS 'when the event became a dead letter';
COMMENT ON INDEX idempotency.parked_pkey IS 'one row per event';

CREATE INDEX parked_due ON idempotency.parked (subscription, partition, retry_at, seq) WHERE retry_at IS NOT NULL;
COMMENT ON INDEX idempotency.parked_due IS 'events to deliver, by time';
CREATE INDEX parked_live ON idempotency.parked (subscription, queue, seq) WHERE dead_at IS NULL AND queue IS NOT NULL;
COMMENT ON INDEX idempotency.parked_live IS 'events that block later events of their aggregate';
CREATE UNIQUE INDEX parked_scheduled ON idempotency.parked (subscription, queue) WHERE retry_at IS NOT NULL AND queue IS NOT NULL;
COMMENT ON INDEX idempotency.parked_scheduled IS 'one event of an aggregate is scheduled, and the others wait';

-- Rows of rolled-back subtransactions only, see next_id()
CREATE UNLOGGED TABLE idempotency_internal.probe ();
COMMENT ON TABLE idempotency_internal.probe IS 'empty; an INSERT gives a subtransaction its id';

-- An event as fetch() returns it and handlers receive it.
CREATE TYPE idempotency.event AS (
	batch bigint,
	seq bigint,
	id uuid,
	topic text,
	aggregate_id text,
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
COMMENT ON COLUMN idempotency.event.topic IS 'the topic';
COMMENT ON COLUMN idempotency.event.aggregate_id IS 'the object of the event';
COMMENT ON COLUMN idempotency.event.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.event.payload IS 'the payload, byte for byte';
COMMENT ON COLUMN idempotency.event.headers IS 'metadata';
COMMENT ON COLUMN idempotency.event.attempt IS '1 for the first delivery, plus 1 for each one that failed';
COMMENT ON COLUMN idempotency.event.published_at IS 'when the event was published';

-- ---------------------------------------------------------------------------
-- Settings of the database and of scopes: configure()
-- ---------------------------------------------------------------------------

-- The pattern "*" is the database.  Of several patterns that match a scope, that with the most
-- characters besides "*" applies.
CREATE TABLE idempotency.configuration (
	name text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	value text NOT NULL,
	literals integer GENERATED ALWAYS AS (length(regexp_replace(scope, E'\\\\(.)|\\*', E'\\1', 'g'))) STORED,
	PRIMARY KEY (name, scope)
);
COMMENT ON TABLE idempotency.configuration IS 'what configure() has stored; read it through idempotency.settings';
COMMENT ON COLUMN idempotency.configuration.name IS 'the setting, without "idempotency."';
COMMENT ON COLUMN idempotency.configuration.scope IS 'a pattern of scopes; *: the whole database';
COMMENT ON COLUMN idempotency.configuration.value IS 'the value';
COMMENT ON COLUMN idempotency.configuration.literals IS 'number of characters of the pattern besides *: the greatest applies';
COMMENT ON INDEX idempotency.configuration_pkey IS 'one value per setting and pattern';

CREATE VIEW idempotency.settings AS
	SELECT s.name, s.scope, s.value
	FROM idempotency.configuration AS s, (SELECT) AS read_only
	ORDER BY s.name, s.literals DESC, s.scope;
COMMENT ON VIEW idempotency.settings IS 'what configure() has stored; of the patterns that match a scope, the first applies';
COMMENT ON COLUMN idempotency.settings.name IS 'the setting, without "idempotency."';
COMMENT ON COLUMN idempotency.settings.scope IS 'a pattern of scopes; *: the whole database';
COMMENT ON COLUMN idempotency.settings.value IS 'the value';

CREATE FUNCTION idempotency_internal.setting_name(name text)
	RETURNS text
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	names CONSTANT text[] := '{retention,wait,max_response_size,max_payload_size,final_errors,documentation,outbox_retention}';
BEGIN
	name := regexp_replace(name, '^idempotency[.]', '');
	IF (name = ANY (names)) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', format('unrecognized setting "%s"', name), NULL,
			format('Pass one of %s.', array_to_string(names, ', ')));
	END IF;
	RETURN name;
END
$$;
COMMENT ON FUNCTION idempotency_internal.setting_name(text) IS 'the name of a setting that configure() can store, or 22023';

-- Every change of the table is checked, also one without configure(), such as a restore.
CREATE FUNCTION idempotency_internal.apply_settings()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres'
AS $$
DECLARE
	s idempotency.configuration;
BEGIN
	PERFORM idempotency_internal.check_transaction('configure');
	FOR s IN SELECT * FROM idempotency.configuration AS e ORDER BY e.name, e.scope LOOP
		PERFORM idempotency_internal.check_name('scope', s.scope);
		IF s.scope !~ E'^(\x3F:\\\\.|[^\\\\])*$' THEN
			PERFORM idempotency_internal.raise('22023', 'pattern of scopes ends in a backslash', NULL,
				'A backslash escapes the next character; write two for one.');
		ELSIF s.literals > 0 AND idempotency_internal.setting_name(s.name) <> ALL ('{retention,wait,max_response_size}') THEN
			PERFORM idempotency_internal.raise('22023', format('setting "%s" cannot depend on a scope', s.name), NULL,
				'Omit the scope; only retention, wait and max_response_size can have one.');
		ELSIF s.value = '' THEN
			PERFORM idempotency_internal.raise('22023', format('value of setting "%s" is empty', s.name), NULL,
				'Pass NULL to remove a stored value.');
		END IF;
		PERFORM idempotency_internal.check_setting(idempotency_internal.setting_name(s.name), s.value);
	END LOOP;
	PERFORM idempotency_internal.forget_settings();
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.apply_settings() IS 'trigger: check the stored settings, and apply them in all sessions';
CREATE TRIGGER apply_settings AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON idempotency.configuration
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.apply_settings();
ALTER TABLE idempotency.configuration ENABLE ALWAYS TRIGGER apply_settings;
COMMENT ON TRIGGER apply_settings ON idempotency.configuration IS 'stored settings are valid, and apply at once';

CREATE FUNCTION idempotency.configure(name text, value text, scope text DEFAULT '*')
	RETURNS text
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	previous text;
BEGIN
	name := idempotency_internal.setting_name(name);
	PERFORM idempotency_internal.check_name('scope', scope);
	PERFORM idempotency_internal.check_transaction('configure');
	LOCK TABLE idempotency.configuration IN SHARE ROW EXCLUSIVE MODE;
	SELECT s.value INTO previous FROM idempotency.configuration AS s WHERE s.name = configure.name AND s.scope = configure.scope;
	IF value IS NULL THEN
		DELETE FROM idempotency.configuration AS s WHERE s.name = configure.name AND s.scope = configure.scope;
	ELSE
		INSERT INTO idempotency.configuration (name, scope, value) VALUES (name, scope, value)
		ON CONFLICT ON CONSTRAINT configuration_pkey DO UPDATE SET value = excluded.value;
	END IF;
	RAISE LOG 'idempotency.configure() by role "%": setting "%", scope "%", %', coalesce(nullif(current_setting('role'), 'none'), session_user),
		name, scope, CASE WHEN value IS NULL THEN 'removed' ELSE format('value "%s"', value) END;
	RETURN previous;
END
$$;
COMMENT ON FUNCTION idempotency.configure(text, text, text) IS
	'store a setting for the database, or for the scopes that match a pattern; NULL removes it; returns the value stored before';

CREATE FUNCTION idempotency.setting(name text, scope text DEFAULT NULL)
	RETURNS text
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	value text;
BEGIN
	name := idempotency_internal.setting_name(name);
	PERFORM idempotency_internal.check_name('scope', scope) WHERE scope IS NOT NULL;
	value := idempotency_internal.setting(name, coalesce(scope, ''));
	PERFORM idempotency_internal.check_setting(name, value);
	RETURN value;
END
$$;
COMMENT ON FUNCTION idempotency.setting(text, text) IS
	'the value of a setting that applies in this session, to a scope if one is given';

-- ---------------------------------------------------------------------------
-- Who holds a key, and who waits for it: holders()
-- ---------------------------------------------------------------------------

CREATE TYPE idempotency.holder AS (
	kind text,
	pid integer,
	prepared text,
	role name,
	since timestamptz,
	age interval,
	state text,
	query text,
	client text,
	application text,
	waits_for integer[]
);
COMMENT ON TYPE idempotency.holder IS 'a transaction that holds a key or waits for it, as from holders()';
COMMENT ON COLUMN idempotency.holder.kind IS 'holds, waits, or prepared: a prepared transaction, which holds';
COMMENT ON COLUMN idempotency.holder.pid IS 'process of the session; NULL: prepared';
COMMENT ON COLUMN idempotency.holder.prepared IS 'name for COMMIT PREPARED and ROLLBACK PREPARED';
COMMENT ON COLUMN idempotency.holder.role IS 'role of the session, or owner of the prepared transaction';
COMMENT ON COLUMN idempotency.holder.since IS 'when the transaction began or was prepared, or the wait began';
COMMENT ON COLUMN idempotency.holder.age IS 'time since the transaction began, or was prepared';
COMMENT ON COLUMN idempotency.holder.state IS 'what the session does, as in pg_stat_activity';
COMMENT ON COLUMN idempotency.holder.query IS 'its last statement; in the portable edition, only if its owner can see it';
COMMENT ON COLUMN idempotency.holder.client IS 'address of the client; NULL: a local socket';
COMMENT ON COLUMN idempotency.holder.application IS 'application_name';
COMMENT ON COLUMN idempotency.holder.waits_for IS 'processes that it waits for; 0 is a prepared transaction';

CREATE FUNCTION idempotency_internal.lock_number(scope idempotency.identifier, key idempotency.identifier)
	RETURNS bigint
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_lock_number';
COMMENT ON FUNCTION idempotency_internal.lock_number(idempotency.identifier, idempotency.identifier) IS
	'the number of the lock of a key';

-- The class of these locks is that of keys/lock.c.
CREATE FUNCTION idempotency_internal.key_locks(scope text, key text, all_keys boolean)
	RETURNS TABLE (pid integer, virtual_transaction text, is_granted boolean, wait_start timestamptz)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
#variable_conflict use_column
DECLARE
	number bigint;
BEGIN
	IF NOT all_keys THEN
		number := idempotency_internal.lock_number(scope, key);
	END IF;
	RETURN QUERY
	SELECT l.pid, l.virtualtransaction, l.granted, l.waitstart
	FROM pg_locks AS l
	WHERE l.locktype = 'advisory' AND l.objsubid = 18756
		AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
		AND (all_keys OR l.classid::bigint << 32 | l.objid::bigint = number);
END
$$;
COMMENT ON FUNCTION idempotency_internal.key_locks(text, text, boolean) IS 'locks of a key, or of all keys';

CREATE FUNCTION idempotency_internal.holders_of(scope text, key text, all_keys boolean)
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	SET jit = off -- which takes longer than reading the locks, whose number the planner overestimates
AS $$
	SELECT CASE WHEN NOT l.is_granted THEN 'waits' WHEN l.pid IS NULL THEN 'prepared' ELSE 'holds' END,
		l.pid, x.gid, coalesce(a.usename, x.owner), coalesce(l.wait_start, a.xact_start, x.prepared),
		clock_timestamp() - coalesce(a.xact_start, x.prepared), a.state, a.query, host(a.client_addr), a.application_name,
		CASE WHEN NOT l.is_granted THEN pg_blocking_pids(l.pid) END
	FROM idempotency_internal.key_locks($1, $2, $3) AS l
	LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
	LEFT JOIN pg_prepared_xacts AS x ON l.pid IS NULL AND EXISTS (SELECT FROM pg_locks AS t
		WHERE t.pid IS NULL AND t.virtualtransaction = l.virtual_transaction AND t.transactionid = x.transaction)
	ORDER BY l.is_granted DESC, 5, 2
$$;
COMMENT ON FUNCTION idempotency_internal.holders_of(text, text, boolean) IS 'holders()';

CREATE FUNCTION idempotency.holders()
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
	SELECT * FROM idempotency_internal.holders_of(NULL, NULL, true)
$$;
COMMENT ON FUNCTION idempotency.holders() IS 'transactions that hold keys, and those that wait for them';

CREATE FUNCTION idempotency.holders(scope idempotency.identifier, key idempotency.identifier)
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
	SELECT * FROM idempotency_internal.holders_of($1::text, $2::text, false)
$$;
COMMENT ON FUNCTION idempotency.holders(idempotency.identifier, idempotency.identifier) IS
	'the transaction that holds a key, and those that wait for it';

-- ---------------------------------------------------------------------------
-- The scan: what a partition reads next
-- ---------------------------------------------------------------------------

-- A position says what was read by a snapshot, "base": every event that is visible in it.
-- To read more, it takes a newer snapshot, "upto", and reads what is visible in "upto" and not
-- in "base", in the order of the numbers.  Then "base" becomes "upto".  The order of the steps
-- makes this possible with an index on the numbers alone:
--
--	1. mark: the last number drawn        2. born: a new transaction id
--	3. the snapshot                       4. top: the last number drawn
--
-- A transaction with an id from "born" on draws its numbers above "mark".  What is visible in the
-- snapshot was drawn up to "top".  So, in the next window, events that are not visible in "base"
-- have numbers above its "mark", except those of transactions that were in progress in "base"
-- ("xids", each with a number below its first one, in "froms"), and of those with ids between the
-- end of "base" and "born": xmax of a snapshot is the last completed id plus 1, so transactions
-- with greater ids can be running ("range_from").  A window is read from the lowest of these numbers
-- of transactions that have ended, or from "mark", to "top"; "reached" is how far.
--
-- A window is read in steps: events that were read are listed in the position until they are
-- acknowledged, so that the position itself only moves on.
--
-- After a restore, the transaction ids of rows and positions are those of another cluster.  A
-- window that was begun there is finished by what is stored.  Then begin_window() locks out
-- publishers once: all rows are committed, those that "former_base" does not show are read as a
-- window, and numbers drawn from then on belong to transactions of this cluster.

-- An id that is greater than those of all transactions that have drawn a number so far.  If
-- the transaction has an id already, that of a subtransaction serves: its row has it.
CREATE FUNCTION idempotency_internal.next_id()
	RETURNS xid8
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	me bigint := pg_current_xact_id_if_assigned()::text::bigint;
	writer bigint;
BEGIN
	IF me IS NULL THEN
		RETURN pg_current_xact_id();
	END IF;
	BEGIN
		INSERT INTO idempotency_internal.probe DEFAULT VALUES RETURNING xmin::text::bigint INTO writer;
		RAISE SQLSTATE 'IK000';
	EXCEPTION
		WHEN SQLSTATE 'IK000' THEN
			RETURN (me + (writer - me & 4294967295))::text::xid8;
	END;
END
$$;
COMMENT ON FUNCTION idempotency_internal.next_id() IS 'a new transaction id';

-- The server's snapshot leaves out the id of its own transaction, which can still roll back.
CREATE FUNCTION idempotency_internal.snapshot()
	RETURNS pg_snapshot
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	now pg_snapshot := pg_current_snapshot();
	me xid8 := pg_current_xact_id_if_assigned();
BEGIN
	IF me IS NULL OR NOT pg_visible_in_snapshot(me, now) THEN
		RETURN now;
	END IF;
	RETURN concat_ws(':', least(pg_snapshot_xmin(now), me), pg_snapshot_xmax(now),
		(SELECT string_agg(x::text, ',' ORDER BY x) FROM (SELECT pg_snapshot_xip(now) UNION SELECT me) AS x (x)));
END
$$;
COMMENT ON FUNCTION idempotency_internal.snapshot() IS 'the current snapshot, in which this transaction is in progress';

-- Whether a transaction can have drawn numbers for events before this call: publish() keeps the lock of its INSERT.
-- It cannot if it is in progress and does not have that lock, in one look at all locks.
CREATE FUNCTION idempotency_internal.has_published(xid xid8 DEFAULT pg_current_xact_id_if_assigned())
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT $1 IS NOT NULL AND NOT EXISTS (
		SELECT FROM pg_locks AS l
		GROUP BY l.virtualtransaction
		HAVING bool_or(l.locktype = 'transactionid' AND l.transactionid = $1::xid AND l.mode = 'ExclusiveLock')
			AND NOT bool_or(l.locktype = 'relation' AND l.relation = 'idempotency.outbox'::regclass AND l.mode = 'RowExclusiveLock'
				AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())))
$$;
COMMENT ON FUNCTION idempotency_internal.has_published(xid8) IS 'whether a transaction can have published events';

-- Whether the ids of a position are those of another cluster, or of another table: after a restore.
-- Without a subquery, so that the planner inlines it.
CREATE FUNCTION idempotency_internal.is_foreign(p idempotency.position)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT p.relation <> 'idempotency.outbox'::regclass OR p.system_identifier <> (pg_control_system()).system_identifier
$$;
COMMENT ON FUNCTION idempotency_internal.is_foreign(idempotency.position) IS 'whether a position was restored and not used here yet';

-- The columns xids, froms and range_from for a snapshot, by a position that has read less.
CREATE FUNCTION idempotency_internal.open_transactions(
	p idempotency.position, snapshot pg_snapshot, OUT xids xid8[], OUT froms bigint[], OUT range_from bigint)
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
DECLARE
	last bigint;
BEGIN
	IF pg_snapshot_xmin(snapshot) = pg_snapshot_xmax(snapshot) THEN
		xids := '{}';
		froms := '{}';
	ELSE
		last := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
		SELECT coalesce(array_agg(x), '{}'), coalesce(array_agg(CASE
			WHEN u.start IS NOT NULL THEN u.start
			WHEN x >= p.born THEN p.mark
			WHEN x >= pg_snapshot_xmax(p.base) THEN p.range_from
			-- one that no position has seen: the first subscription finds it, or it is this transaction
			WHEN NOT idempotency_internal.has_published(x) THEN last
			ELSE 0
		END), '{}')
		INTO xids, froms
		FROM pg_snapshot_xip(snapshot) AS x
		LEFT JOIN unnest(p.xids, p.froms) AS u (xid, start) ON u.xid = x;
	END IF;
	range_from := CASE WHEN pg_snapshot_xmax(snapshot) < p.born THEN p.range_from ELSE p.mark END;
END
$$;
COMMENT ON FUNCTION idempotency_internal.open_transactions(idempotency.position, pg_snapshot) IS
	'what was in progress in a snapshot, and numbers below the first ones';

CREATE FUNCTION idempotency_internal.raise_sequence()
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('55000', 'sequence "idempotency.outbox_seq" is behind the numbers of events',
		'The outbox was replicated or restored without its sequence.',
		'Call setval(''idempotency.outbox_seq'', (SELECT max(n) FROM (SELECT seq FROM idempotency.outbox UNION ALL '
		'SELECT seq FROM idempotency.parked UNION ALL SELECT greatest(top, mark, skip) FROM idempotency.position) AS numbers (n))).')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_sequence() IS '55000: the sequence was not restored';

-- Begins a window: sets the columns from upto to reached, and top.  "drawn" and "born" are steps 1 and 2,
-- or NULL.
CREATE FUNCTION idempotency_internal.begin_window(INOUT p idempotency.position, part idempotency.partition, drawn bigint, born xid8)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lowest bigint;
BEGIN
	IF part.stop IS NOT NULL THEN
		p.upto := part.stop;
		p.upto_born := part.stop_born;
		p.upto_mark := part.stop_mark;
		p.top := part.stop_top;
	ELSE
		IF idempotency_internal.is_foreign(p) THEN
			p := idempotency_internal.begin_here(p);
			RETURN;
		END IF;
		p.upto_mark := coalesce(drawn, pg_sequence_last_value('idempotency.outbox_seq'), 0);
		p.upto_born := coalesce(born, idempotency_internal.next_id());
		p.upto := idempotency_internal.snapshot();
		p.top := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
		IF p.top < p.mark THEN
			PERFORM idempotency_internal.raise_sequence();
		END IF;
	END IF;
	IF p.xids <> '{}' THEN
		SELECT min(u.start) INTO lowest FROM unnest(p.xids, p.froms) AS u (xid, start) WHERE pg_visible_in_snapshot(u.xid, p.upto);
	END IF;
	IF p.born > pg_snapshot_xmax(p.base) THEN
		lowest := least(lowest, p.range_from);
	END IF;
	p.reached := least(lowest, p.mark);
	-- past numbers before the first event
	IF p.top - p.reached > 20000 THEN
		p.reached := least(p.top, greatest(p.reached, coalesce((SELECT min(o.seq) - 1 FROM idempotency.outbox AS o), p.top)));
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.begin_window(idempotency.position, idempotency.partition, bigint, xid8) IS
	'begin to read the events between the position and now';

-- The same for the position of another cluster.  A transaction that has published, here, would
-- read its own events as those of the dump.
CREATE FUNCTION idempotency_internal.begin_here(INOUT p idempotency.position)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	last bigint;
BEGIN
	IF idempotency_internal.has_published() THEN
		PERFORM idempotency_internal.raise('55000', 'cannot fetch in a transaction that has published, after a restore', NULL,
			'Commit, and call idempotency.fetch() in a transaction of its own.');
	END IF;
	PERFORM idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait()));
	LOCK TABLE idempotency.outbox IN SHARE ROW EXCLUSIVE MODE;
	PERFORM set_config('lock_timeout', lock_timeout, true);
	last := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	IF last < greatest(p.top, p.mark, p.skip) OR EXISTS (SELECT FROM idempotency.outbox AS o WHERE o.seq > last)
		OR EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq > last) THEN
		PERFORM idempotency_internal.raise_sequence();
	END IF;
	p.reached := least(p.mark, p.range_from, (SELECT min(f) FROM unnest(p.froms) AS f));
	p.former_base := p.base;
	p.former_top := p.top;
	p.born := idempotency_internal.next_id();
	p.base := idempotency_internal.snapshot();
	p.mark := last;
	p.top := last;
	p.range_from := last;
	p.xids := ARRAY(SELECT pg_snapshot_xip(p.base));
	p.froms := array_fill(last, ARRAY[cardinality(p.xids)]);
	p.upto := p.base;
	p.upto_born := p.born;
	p.upto_mark := last;
	p.system_identifier := (SELECT c.system_identifier FROM pg_control_system() AS c);
	p.relation := 'idempotency.outbox'::regclass::oid;
END
$$;
COMMENT ON FUNCTION idempotency_internal.begin_here(idempotency.position) IS
	'begin to read the events of a dump that the position had not read';

-- Ends a window, all of which was read.
CREATE FUNCTION idempotency_internal.end_window(INOUT p idempotency.position, part idempotency.partition)
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
DECLARE
	started record := idempotency_internal.open_transactions(p, p.upto);
BEGIN
	p.ended := coalesce(p.upto_born = part.stop_born AND p.upto_mark = part.stop_mark, false);
	p.xids := started.xids;
	p.froms := started.froms;
	p.range_from := started.range_from;
	p.base := p.upto;
	p.born := p.upto_born;
	p.mark := p.upto_mark;
	p.upto := NULL;
	p.upto_born := NULL;
	p.upto_mark := NULL;
	p.former_base := NULL;
	p.former_top := NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.end_window(idempotency.position, idempotency.partition) IS 'end a window';

-- Tells whether a partition has something for fetch(): no batch with events is out, and there are events to deliver, or
-- the log is to be read on.  It takes no lock and writes nothing, so that waiting consumers do neither.
-- Events of other subscriptions alone are passed by a new window if there are a thousand of them, so that the next call
-- does not read them again, or if one is a minute old, so that it can be deleted.
CREATE FUNCTION idempotency_internal.is_due(
	p idempotency.position, is_ending boolean, modulus integer, remainder integer, patterns text[])
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	last bigint;
	now pg_snapshot;
	start bigint;
BEGIN
	-- the batch of a worker has no lease: it is out as long as the worker has it
	IF p.size > 0 AND (CASE p.leased_until WHEN 'infinity' THEN idempotency_internal.is_worker_batch(p.batch)
		ELSE clock_timestamp() BETWEEN p.leased_at AND p.leased_until END) THEN
		RETURN false;
	ELSIF p.upto IS NOT NULL OR p.events <> '{}' OR EXISTS (SELECT FROM idempotency.parked AS k
		WHERE k.subscription = p.subscription AND k.partition = p.partition AND k.retry_at <= clock_timestamp()) THEN
		RETURN true;
	END IF;
	last := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	now := pg_current_snapshot();
	start := CASE WHEN p.born > pg_snapshot_xmax(p.base) THEN p.range_from ELSE p.mark END;
	IF p.xids <> '{}' THEN
		start := least(start, (SELECT min(u.start) FROM unnest(p.xids, p.froms) AS u (xid, start) WHERE pg_visible_in_snapshot(u.xid, now)));
	END IF;
	-- ids of another cluster tell nothing
	IF NOT p.ended AND idempotency_internal.is_foreign(p) THEN
		RETURN true;
	ELSIF p.ended OR last = start AND NOT is_ending THEN
		RETURN false;
	END IF;
	RETURN is_ending OR last < p.mark OR last - start > 1000 OR EXISTS (SELECT FROM idempotency.outbox AS o
		WHERE o.seq > greatest(start, p.skip) AND NOT pg_visible_in_snapshot(o.txid, p.base)
			AND o.txid IS DISTINCT FROM pg_current_xact_id_if_assigned()
			AND (o.bucket % modulus = remainder AND o.aggregatetype LIKE ANY (patterns) OR o.published_at < clock_timestamp() - interval '1 minute'));
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_due(idempotency.position, boolean, integer, integer, text[]) IS
	'whether a partition has something for fetch()';

-- Copies events of the log that are in the list into the table of parked events, and returns
-- the others.  An event that an earlier one of its aggregate blocks waits; one that is not due
-- yet is scheduled.
CREATE FUNCTION idempotency_internal.park_blocked(p idempotency.position, seqs bigint[])
	RETURNS bigint[]
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	now timestamptz := clock_timestamp();
	blocked text[] := ARRAY(SELECT DISTINCT o.aggregateid FROM idempotency.outbox AS o
		WHERE o.seq = ANY (seqs) AND o.deliver_at IS NULL AND EXISTS (SELECT FROM idempotency.parked AS k
			WHERE k.subscription = p.subscription AND k.queue = o.aggregateid AND k.dead_at IS NULL));
	leaving bigint[];
BEGIN
	WITH moved AS (
		INSERT INTO idempotency.parked (subscription, partition, seq, published_at, id, bucket, bytes, queue, aggregatetype, aggregateid,
			type, payload, headers, attempts, alone, retry_at)
		SELECT p.subscription, p.partition, o.seq, o.published_at, o.id, o.bucket, o.bytes, CASE WHEN o.deliver_at IS NULL THEN o.aggregateid END,
			o.aggregatetype, o.aggregateid, o.type, o.payload, o.headers, 0, false, o.deliver_at
		FROM idempotency.outbox AS o
		WHERE o.seq = ANY (seqs) AND (o.deliver_at > now OR o.deliver_at IS NULL AND o.aggregateid = ANY (blocked))
		ON CONFLICT (subscription, seq) DO NOTHING
		RETURNING seq)
	SELECT array_agg(m.seq) INTO leaving FROM moved AS m;
	RETURN ARRAY(SELECT s.seq FROM unnest(seqs) WITH ORDINALITY AS s (seq, n)
		WHERE (s.seq = ANY (leaving)) IS NOT TRUE ORDER BY s.n);
END
$$;
COMMENT ON FUNCTION idempotency_internal.park_blocked(idempotency.position, bigint[]) IS
	'park those events of the log that cannot be delivered yet, and return the others';

-- Adds events of the log to the list of a position, until it has max_events or max_bytes, or
-- nothing is left.  It ends a window and begins another one at most, and reads 100,000 numbers at most.
--
-- The planner expects one row from conditions on snapshots, and would sort the whole window for
-- each batch: fetch() turns all other plans off than the index in its order.
CREATE FUNCTION idempotency_internal.read_log(
	INOUT p idempotency.position, part idempotency.partition, patterns text[], max_events integer, max_bytes bigint,
	drawn bigint, born xid8, has_parked boolean)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	everything boolean := patterns = '{%}';
	queues text[];
	missing integer;
	start bigint;
	upto bigint;
	seqs bigint[];
	sizes integer[];
	total bigint;
	begun boolean := false;
	held boolean;
	is_cut boolean;
BEGIN
	-- aggregates whose events wait; of more than 100, any
	IF has_parked THEN
		queues := ARRAY(SELECT k.queue FROM idempotency.parked AS k
			WHERE k.subscription = p.subscription AND k.retry_at IS NOT NULL AND k.queue IS NOT NULL LIMIT 101);
	END IF;
	FOR step IN 1 .. 5 LOOP
		IF p.upto IS NULL THEN
			EXIT WHEN p.ended OR begun;
			p := idempotency_internal.begin_window(p, part, drawn, born);
			begun := true;
		END IF;
		missing := max_events - cardinality(p.events);
		EXIT WHEN missing <= 0 OR max_bytes <= 0;
		start := greatest(p.reached, p.skip);
		upto := least(p.top, start + 20000);
		SELECT array_agg(e.seq), sum(e.bytes), bool_or(e.held)
		INTO seqs, total, held
		FROM (SELECT o.seq, o.bytes, o.deliver_at IS NOT NULL OR o.aggregateid = ANY (queues) AS held
			FROM idempotency.outbox AS o
			WHERE o.seq > start AND o.seq <= upto
				AND CASE WHEN p.former_base IS NULL
					THEN pg_visible_in_snapshot(o.txid, p.upto) AND NOT pg_visible_in_snapshot(o.txid, p.base)
					ELSE (o.seq <= p.former_top AND pg_visible_in_snapshot(o.txid, p.former_base)) IS NOT TRUE
				END
				AND (part.modulus = 1 OR o.bucket % part.modulus = part.remainder)
				AND (everything OR o.aggregatetype LIKE ANY (patterns))
				AND (NOT p.retried OR o.seq <> ALL (p.events)) -- a copy that seek() did not see, because its topic was left out
			ORDER BY o.seq
			LIMIT missing) AS e;

		-- Cut the list where it has enough bytes, but not before its first event
		is_cut := cardinality(seqs) = missing;
		IF total > max_bytes THEN
			sizes := ARRAY(SELECT o.bytes FROM idempotency.outbox AS o WHERE o.seq = ANY (seqs) ORDER BY o.seq);
			total := sizes[1];
			FOR i IN 2 .. cardinality(seqs) + 1 LOOP
				IF i > cardinality(seqs) OR total + sizes[i] > max_bytes THEN
					is_cut := is_cut OR i <= cardinality(seqs);
					seqs := seqs[1 : i - 1];
					EXIT;
				END IF;
				total := total + sizes[i];
			END LOOP;
			-- the events before it are enough
			IF p.events <> '{}' AND total > max_bytes THEN
				EXIT;
			END IF;
		END IF;
		max_bytes := max_bytes - coalesce(total, 0);
		-- a long range can have no rows: a copy that takes over is ahead of its source
		p.reached := CASE
			WHEN is_cut THEN seqs[cardinality(seqs)]
			WHEN seqs IS NULL AND p.top - upto > 1000000
			THEN least(p.top, (SELECT min(o.seq) - 1 FROM idempotency.outbox AS o WHERE o.seq > upto))
			ELSE upto
		END;

		IF held OR cardinality(queues) > 100 THEN
			seqs := idempotency_internal.park_blocked(p, seqs);
		END IF;
		-- The log alone is listed by number, as fetch() returns it: nack() takes out what is behind
		IF seqs[1] < p.events[cardinality(p.events)] AND NOT p.retried THEN
			p.events := ARRAY(SELECT e FROM unnest(p.events || seqs) AS e ORDER BY e);
		ELSIF seqs IS NOT NULL THEN
			p.events := p.events || seqs;
		END IF;
		IF p.reached >= p.top THEN
			p := idempotency_internal.end_window(p, part);
		END IF;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.read_log(idempotency.position, idempotency.partition, text[], integer, bigint, bigint, xid8, boolean) IS
	'add events of the log to the list of a position';

-- ---------------------------------------------------------------------------
-- Subscriptions
-- ---------------------------------------------------------------------------

-- The role that calls: that of the session, since the functions run with the rights of
-- their owner.  In a security-restricted operation (ANALYZE, also of autovacuum, CREATE INDEX,
-- REFRESH MATERIALIZED VIEW, ...), the code of a table's owner runs in the session of another
-- role: it gets 42501.
CREATE FUNCTION idempotency_internal.caller()
	RETURNS name
	LANGUAGE C STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idempotency_caller';
COMMENT ON FUNCTION idempotency_internal.caller() IS 'the role that called a function of the owner';

-- Logs a call that changes or deletes what others rely on.
CREATE FUNCTION idempotency_internal.log_call(function text, what text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	RAISE LOG 'idempotency.%() by role "%": %', function, idempotency_internal.caller(), what;
END
$$;
COMMENT ON FUNCTION idempotency_internal.log_call(text, text) IS 'log a call of an owner or an operator';

-- The first 8 kB of whole characters, each of which has 4 bytes at most.
CREATE FUNCTION idempotency_internal.clipped_error(error text)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
	clipped text := left(error, 8192);
BEGIN
	WHILE octet_length(clipped) > 8192 LOOP
		clipped := left(clipped, -greatest((octet_length(clipped) - 8192) / 4, 1));
	END LOOP;
	RETURN clipped;
END
$$;
COMMENT ON FUNCTION idempotency_internal.clipped_error(text) IS 'how much of an error is kept';

-- The subscription of that name.  Raises 42704 if there is none, and 42501 if the caller does
-- not have the privileges of its owner, or is not known.
CREATE FUNCTION idempotency_internal.subscription_of(name text)
	RETURNS idempotency.subscription
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	caller name := idempotency_internal.caller();
	s idempotency.subscription;
BEGIN
	SELECT * INTO s FROM idempotency.subscription AS e WHERE e.subscription = name COLLATE "C";
	IF s.subscription IS NULL THEN
		PERFORM idempotency_internal.check_name('subscription', name);
		PERFORM idempotency_internal.raise('42704', format('subscription "%s" does not exist', name), NULL,
			'Use idempotency.subscribe() to create it; the view idempotency.subscriptions lists all.');
	ELSIF s.owner <> caller THEN
		IF NOT EXISTS (SELECT FROM pg_roles AS r
			WHERE r.rolname = caller
				AND (r.rolsuper OR EXISTS (SELECT FROM pg_roles AS o WHERE o.rolname = s.owner AND pg_has_role(r.oid, o.oid, 'USAGE')))) THEN
			PERFORM idempotency_internal.raise('42501', format('permission denied for subscription "%s"', name),
				format('Its owner is "%s".', s.owner), 'Call as a role that has the privileges of the owner.');
		END IF;
	END IF;
	RETURN s;
END
$$;
COMMENT ON FUNCTION idempotency_internal.subscription_of(text) IS 'a subscription that the caller can use';

CREATE FUNCTION idempotency_internal.raise_in_use(name text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('55P03', format('subscription "%s" is in use', $1),
		'Another transaction that fetched, acknowledged, changed it or called reap() is still open.', 'Try again, or set idempotency.wait higher.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_in_use(text) IS '55P03: another transaction uses the subscription';

-- Raises 25006 if the transaction cannot write, and 25001 if its snapshot stays: what others have published, read
-- or deleted since then would be lost or come twice.
CREATE FUNCTION idempotency_internal.check_transaction(function text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only(function);
	ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
		PERFORM idempotency_internal.raise('25001', format('idempotency.%s() works in READ COMMITTED only', function),
			'A fixed snapshot does not show what other transactions have changed since.', 'Use SET TRANSACTION ISOLATION LEVEL READ COMMITTED; before CALL, SET default_transaction_isolation = ''read committed''.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_transaction(text) IS '25006, 25001: the transaction cannot read events';

-- The subscription of that name, locked with all its partitions to the end of the transaction:
-- no consumer uses it meanwhile.  Waits for consumers' transactions for idempotency.wait.
CREATE FUNCTION idempotency_internal.locked_subscription(function text, name text)
	RETURNS idempotency.subscription
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	bounded boolean;
	s idempotency.subscription;
BEGIN
	PERFORM idempotency_internal.check_transaction(function);
	s := idempotency_internal.subscription_of(name);
	BEGIN
		bounded := idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait()));
		-- a transaction that has called reap() holds it in SHARE mode
		LOCK TABLE idempotency.subscription IN ROW EXCLUSIVE MODE;
		PERFORM FROM idempotency.subscription AS e WHERE e.subscription = s.subscription FOR UPDATE;
		PERFORM FROM idempotency.partition AS a WHERE a.subscription = s.subscription ORDER BY a.partition FOR UPDATE;
		PERFORM set_config('lock_timeout', lock_timeout, true);
	EXCEPTION
		WHEN lock_not_available THEN
			IF NOT bounded THEN
				RAISE;
			END IF;
			PERFORM idempotency_internal.raise_in_use(name);
	END;
	-- as it is now
	RETURN idempotency_internal.subscription_of(name);
END
$$;
COMMENT ON FUNCTION idempotency_internal.locked_subscription(text, text) IS
	'a subscription that the caller can use, locked with all its partitions';

-- Raises 22023, or IK400, for patterns of topics that cannot be used; returns them for LIKE.
CREATE FUNCTION idempotency_internal.patterns_of(topics text[])
	RETURNS text[]
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	pattern text;
	character text;
	escaped boolean;
	converted text;
	patterns text[] := '{}';
BEGIN
	IF array_ndims(topics) IS DISTINCT FROM 1 OR array_position(topics, NULL) IS NOT NULL THEN
		PERFORM idempotency_internal.raise('22023', 'topics must be a list of patterns', NULL,
			'Pass at least one, such as ARRAY[''order.*''], and no NULL.');
	ELSIF cardinality(topics) > 1000 THEN
		-- the reaper and publishers compare all of them
		PERFORM idempotency_internal.raise('22023', 'topics must be 1000 patterns at most', NULL, 'Use * for several topics.');
	END IF;
	FOREACH pattern IN ARRAY topics LOOP
		PERFORM idempotency_internal.check_name('topic', pattern);
		converted := '';
		escaped := false;
		FOREACH character IN ARRAY string_to_array(pattern, NULL) LOOP
			converted := converted || CASE
				WHEN escaped OR character IN ('%', '_') THEN E'\\' || character
				WHEN character = '*' THEN '%'
				WHEN character = E'\\' THEN ''
				ELSE character
			END;
			escaped := character = E'\\' AND NOT escaped;
		END LOOP;
		IF escaped THEN
			PERFORM idempotency_internal.raise('22023', 'pattern of topics ends in a backslash', NULL,
				'A backslash escapes the next character; write two for one.');
		END IF;
		patterns := patterns || converted;
	END LOOP;
	RETURN patterns;
END
$$;
COMMENT ON FUNCTION idempotency_internal.patterns_of(text[]) IS 'patterns of topics as patterns of LIKE';

-- Makes a generation of partitions that begins at a snapshot; "model" is a position that has read
-- less, or NULL.  From the beginning, rows of another cluster can have ids that are not used here
-- yet, and are read as after a restore.
CREATE FUNCTION idempotency_internal.create_partitions(
	name text, partitions integer, base pg_snapshot, born xid8, mark bigint, top bigint, model idempotency.position)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	started record := idempotency_internal.open_transactions(model, base);
	is_foreign boolean := mark = 0 AND EXISTS (SELECT FROM idempotency.outbox AS o
		WHERE o.txid >= pg_snapshot_xmax(pg_current_snapshot()) AND o.txid IS DISTINCT FROM pg_current_xact_id_if_assigned());
	next integer;
	first integer;
BEGIN
	IF partitions NOT BETWEEN 1 AND 256 THEN
		PERFORM idempotency_internal.raise('22023', 'partitions must be from 1 to 256', NULL,
			'Pass how many consumers can have a batch at a time.');
	END IF;
	SELECT coalesce(max(a.generation), 0) + 1,
		CASE WHEN coalesce(min(a.partition), partitions) >= partitions THEN 0 ELSE max(a.partition) + 1 END
	INTO next, first
	FROM idempotency.partition AS a WHERE a.subscription = name;
	IF first + partitions > 1024 THEN
		PERFORM idempotency_internal.raise('55000', format('subscription "%s" has too many partitions', name),
			'Those of earlier changes have events to deliver, and count.', 'Try again when the view idempotency.partitions shows fewer.');
	END IF;
	INSERT INTO idempotency.partition (subscription, partition, generation, remainder, modulus)
	SELECT name, first + r, next, r, partitions FROM generate_series(0, partitions - 1) AS r;
	INSERT INTO idempotency.position (subscription, partition, version, changed_at, system_identifier, relation, base, born, mark, top,
		xids, froms, range_from, reached, skip, ended, events, size, retried, failures, alone, acknowledged, failed)
	SELECT name, first + r, 1, clock_timestamp(), CASE WHEN NOT is_foreign THEN c.system_identifier ELSE 0 END,
		'idempotency.outbox'::regclass::oid, base, born, mark, top,
		-- without a model, "born" is that of a subtransaction that has ended: no id is between the end of "base" and it
		started.xids, started.froms, coalesce(started.range_from, mark), mark, 0, false, '{}', 0, false, 0, false, 0, 0
	FROM generate_series(0, partitions - 1) AS r, pg_control_system() AS c;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise_altered('position');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.create_partitions(text, integer, pg_snapshot, xid8, bigint, bigint, idempotency.position) IS
	'create partitions and their positions';

-- The same from now on: what is visible now is left out, and what is in progress is not.  Any
-- position of this cluster knows numbers below those of transactions in progress.  A current partition
-- of another cluster cannot end at a snapshot of this one, and begins to read here before.
CREATE FUNCTION idempotency_internal.create_partitions_now(name text, partitions integer)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	p idempotency.position;
	drawn bigint;
	born xid8;
	base pg_snapshot;
	top bigint;
	model idempotency.position;
BEGIN
	FOR p IN
		SELECT n.* FROM idempotency.partition AS a JOIN idempotency.position AS n USING (subscription, partition)
		WHERE a.subscription = name AND a.stop IS NULL AND idempotency_internal.is_foreign(n)
	LOOP
		IF p.upto IS NOT NULL THEN
			PERFORM idempotency_internal.raise('55000', format('subscription "%s" has not read the events of its restore', name), NULL,
				'Call idempotency.fetch() and idempotency.ack() first.');
		END IF;
		PERFORM idempotency_internal.put_position(idempotency_internal.begin_here(p));
	END LOOP;
	drawn := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	born := idempotency_internal.next_id();
	base := idempotency_internal.snapshot();
	top := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
	SELECT n.* INTO model
	FROM idempotency.position AS n
	WHERE NOT idempotency_internal.is_foreign(n)
	ORDER BY n.mark DESC
	LIMIT 1;
	UPDATE idempotency.partition AS a SET stop = base, stop_born = born, stop_mark = drawn, stop_top = top
	WHERE a.subscription = name AND a.stop IS NULL;
	PERFORM idempotency_internal.create_partitions(name, partitions, base, born, drawn, top, model);
END
$$;
COMMENT ON FUNCTION idempotency_internal.create_partitions_now(text, integer) IS
	'create partitions that begin now, and end the current ones here';

-- Raises an error unless a function can handle events; returns its stored form.
CREATE FUNCTION idempotency_internal.handler_text(handler regprocedure)
	RETURNS text
	LANGUAGE plpgsql STABLE STRICT PARALLEL SAFE
AS $$
DECLARE
	routine record;
BEGIN
	SELECT n.nspname, p.proname, p.prokind = 'f' AND NOT p.proretset AND p.prorettype = 'void'::regtype
		AND p.pronargs = 1 AND p.proargtypes[0] = 'idempotency.event'::regtype AS fits
	INTO routine
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
	WHERE p.oid = handler;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise('42883', format('handler with OID %s does not exist', handler::oid), NULL,
			'Pass a function as regprocedure.');
	ELSIF NOT routine.fits THEN
		PERFORM idempotency_internal.raise('42P13', format('function %s cannot handle events', handler), NULL,
			'A handler takes one idempotency.event and returns void.');
	END IF;
	RETURN format('%I.%I(idempotency.event)', routine.nspname, routine.proname);
END
$$;
COMMENT ON FUNCTION idempotency_internal.handler_text(regprocedure) IS 'the stored form of a handler';

-- Raises 42501 unless the owner of a handler's function, which can replace its body, can act as
-- the owner of the subscription anyway.
CREATE FUNCTION idempotency_internal.check_handler_owner(handler text, owner name)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE
AS $$
DECLARE
	rights text := CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'SET' ELSE 'MEMBER' END;
	function_owner name;
BEGIN
	SELECT r.rolname INTO function_owner
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace JOIN pg_roles AS r ON r.oid = p.proowner
	WHERE format('%I.%I(idempotency.event)', n.nspname, p.proname) = handler
		AND p.pronargs = 1 AND p.proargtypes[0] = 'idempotency.event'::regtype
		AND NOT EXISTS (SELECT FROM pg_roles AS o WHERE o.rolname = owner
			AND (pg_has_role(r.oid, o.oid, 'USAGE') OR pg_has_role(r.oid, o.oid, rights)));
	IF FOUND THEN
		PERFORM idempotency_internal.raise('42501',
			format('owner "%s" of handler %s does not have the privileges of role "%s"', function_owner, handler, owner),
			'The owner of a function can replace its body at any time, and the handler runs with the privileges of the subscription''s owner.',
			'Use ALTER FUNCTION ... OWNER TO to make the subscription''s owner the owner of the handler.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_handler_owner(text, name) IS
	'raise an error unless the owner of a handler can act as the owner of the subscription';

-- Changes the options that are not NULL.  Logs a change as one by the function, if that is not NULL.
CREATE FUNCTION idempotency_internal.change(
	function text, name text, new_topics text[], new_handler regprocedure, new_max_attempts integer, new_retry_delay interval,
	new_max_retry_delay interval, new_max_lag interval, new_retention interval, new_partitions integer, new_owner regrole)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	never CONSTANT interval := '-1 second';
	caller name := idempotency_internal.caller();
	rights text := CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'SET' ELSE 'MEMBER' END;
	owner_name name;
	stored idempotency.subscription;
	changed idempotency.subscription;
	is_changed boolean := false;
BEGIN
	IF new_max_attempts < 1 THEN
		PERFORM idempotency_internal.raise('22023', 'max_attempts must be positive', NULL,
			'Pass after how many failures an event is a dead letter.');
	END IF;
	PERFORM idempotency_internal.raise('22023', format('%s must not be negative', d.what), NULL, 'Pass an interval such as ''1 second'', or leave it out.')
	FROM (VALUES ('retry_delay', new_retry_delay), ('max_retry_delay', new_max_retry_delay), ('max_lag', nullif(new_max_lag, never)),
		('dead_letter_retention', nullif(new_retention, never))) AS d (what, value)
	WHERE d.value < interval '0';
	IF new_owner IS NOT NULL THEN
		SELECT r.rolname INTO owner_name FROM pg_roles AS r WHERE r.oid = new_owner;
		IF NOT FOUND THEN
			PERFORM idempotency_internal.raise('42704', format('role with OID %s does not exist', new_owner::oid), NULL, 'Pass the name of a role.');
		ELSIF NOT pg_has_role(caller, owner_name, rights) THEN
			PERFORM idempotency_internal.raise('42501', format('must be a member of role "%s" to let it own a subscription', owner_name), NULL,
				'Leave out the owner, or let a member of that role subscribe.');
		END IF;
	END IF;
	SELECT * INTO stored FROM idempotency.subscription AS s WHERE s.subscription = name;
	UPDATE idempotency.subscription AS s SET
		owner = coalesce(owner_name, s.owner),
		topics = coalesce(new_topics, s.topics),
		patterns = CASE WHEN new_topics IS NULL THEN s.patterns ELSE idempotency_internal.patterns_of(new_topics) END,
		handler = CASE new_handler::oid WHEN 0 THEN NULL ELSE coalesce(idempotency_internal.handler_text(new_handler), s.handler) END,
		max_attempts = coalesce(new_max_attempts, s.max_attempts),
		retry_delay = coalesce(new_retry_delay, s.retry_delay),
		max_retry_delay = coalesce(new_max_retry_delay, s.max_retry_delay),
		max_lag = nullif(coalesce(new_max_lag, s.max_lag), never),
		dead_letter_retention = nullif(coalesce(new_retention, s.dead_letter_retention), never)
	WHERE s.subscription = name
	RETURNING * INTO changed;
	is_changed := changed IS DISTINCT FROM stored;
	IF changed.handler IS NOT NULL THEN
		IF new_handler IS NOT NULL OR new_owner IS NOT NULL THEN
			PERFORM idempotency_internal.check_handler(changed.handler, changed.owner);
		END IF;
		PERFORM idempotency_internal.wake_relay(name);
	END IF;
	IF new_partitions <> (SELECT a.modulus FROM idempotency.partition AS a WHERE a.subscription = name AND a.stop IS NULL LIMIT 1) THEN
		PERFORM idempotency_internal.create_partitions_now(name, new_partitions);
		is_changed := true;
	END IF;
	IF is_changed AND function IS NOT NULL THEN
		PERFORM idempotency_internal.log_call(function, format('subscription "%s" of role "%s" %s', name, stored.owner,
			CASE changed.owner WHEN stored.owner THEN 'was changed' ELSE format('belongs to role "%s" now', changed.owner) END));
	END IF;
	RETURN is_changed;
END
$$;
COMMENT ON FUNCTION idempotency_internal.change(text, text, text[], regprocedure, integer, interval, interval, interval, interval, integer, regrole) IS
	'change options of a subscription; true if one had another value';

CREATE FUNCTION idempotency.subscribe(
	subscription text, topics text[], handler regprocedure DEFAULT NULL, start_at text DEFAULT NULL,
	max_attempts integer DEFAULT NULL, retry_delay interval DEFAULT NULL, max_retry_delay interval DEFAULT NULL,
	max_lag interval DEFAULT NULL, owner regrole DEFAULT NULL, partitions integer DEFAULT NULL,
	dead_letter_retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	bounded boolean;
	is_new boolean;
	stored text;
BEGIN
	PERFORM idempotency_internal.check_name('subscription', subscription);
	PERFORM idempotency_internal.check_transaction('subscribe');
	IF start_at NOT IN ('now', 'beginning') THEN
		PERFORM idempotency_internal.raise('22023', 'start_at must be ''now'' or ''beginning''', NULL,
			'Pass ''beginning'' for the events that the outbox still has, or omit it.');
	ELSIF topics IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'topics are missing', NULL, 'Pass patterns, such as ARRAY[''order.*''].');
	END IF;
	BEGIN
		bounded := idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait()));
		INSERT INTO idempotency.subscription AS s (subscription, owner, topics, patterns, start_at, max_attempts, retry_delay, max_retry_delay, created_at)
		VALUES (subscribe.subscription, idempotency_internal.caller(), subscribe.topics, idempotency_internal.patterns_of(topics),
			coalesce(subscribe.start_at, 'now'), 10, '1 second', '1 hour', clock_timestamp())
		ON CONFLICT DO NOTHING;
		is_new := FOUND;
		PERFORM set_config('lock_timeout', lock_timeout, true);
	EXCEPTION
		WHEN lock_not_available THEN
			IF NOT bounded THEN
				RAISE;
			END IF;
			PERFORM idempotency_internal.raise_in_use(subscription);
	END;
	IF NOT is_new THEN
		stored := (idempotency_internal.locked_subscription('subscribe', subscription)).start_at;
		IF start_at <> stored THEN
			PERFORM idempotency_internal.raise('55000', format('subscription "%s" exists, and started at ''%s''', subscription, stored), NULL,
				'Omit start_at, or call idempotency.seek() to move the subscription.');
		END IF;
	ELSIF start_at = 'beginning' THEN
		PERFORM idempotency_internal.create_partitions(subscription, coalesce(partitions, 1), '1:1:', '1', 0, 0, NULL);
	ELSE
		PERFORM idempotency_internal.create_partitions_now(subscription, coalesce(partitions, 1));
	END IF;
	PERFORM idempotency_internal.change(CASE WHEN NOT is_new THEN 'subscribe' END, subscription, topics, handler, max_attempts,
		retry_delay, max_retry_delay, max_lag, dead_letter_retention, partitions, owner);
	RETURN is_new;
END
$$;
COMMENT ON FUNCTION idempotency.subscribe(text, text[], regprocedure, text, integer, interval, interval, interval, regrole, integer, interval) IS
	'create a subscription, or change the options that are named; true if it is new';

CREATE FUNCTION idempotency.alter_subscription(
	subscription text, topics text[] DEFAULT NULL, handler regprocedure DEFAULT NULL, max_attempts integer DEFAULT NULL,
	retry_delay interval DEFAULT NULL, max_retry_delay interval DEFAULT NULL, max_lag interval DEFAULT NULL,
	owner regrole DEFAULT NULL, partitions integer DEFAULT NULL, dead_letter_retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency_internal.locked_subscription('alter_subscription', subscription);
	RETURN idempotency_internal.change('alter_subscription', subscription, topics, handler, max_attempts,
		retry_delay, max_retry_delay, max_lag, dead_letter_retention, partitions, owner);
END
$$;
COMMENT ON FUNCTION idempotency.alter_subscription(text, text[], regprocedure, integer, interval, interval, interval, regrole, integer, interval) IS
	'change the options of a subscription that are named; true if one had another value';

CREATE FUNCTION idempotency.unsubscribe(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	locked idempotency.subscription;
	dead bigint;
BEGIN
	PERFORM idempotency_internal.check_name('subscription', subscription);
	-- an old snapshot does not show all
	PERFORM idempotency_internal.check_transaction('unsubscribe');
	IF NOT EXISTS (SELECT FROM idempotency.subscription AS s WHERE s.subscription = unsubscribe.subscription COLLATE "C") THEN
		RETURN false;
	END IF;
	locked := idempotency_internal.locked_subscription('unsubscribe', subscription);
	DELETE FROM idempotency.subscription AS s WHERE s.subscription = unsubscribe.subscription COLLATE "C";
	DELETE FROM idempotency.partition AS a WHERE a.subscription = unsubscribe.subscription COLLATE "C";
	DELETE FROM idempotency.position AS n WHERE n.subscription = unsubscribe.subscription COLLATE "C";
	DELETE FROM idempotency.parked AS k WHERE k.subscription = unsubscribe.subscription COLLATE "C";
	GET DIAGNOSTICS dead = ROW_COUNT;
	PERFORM idempotency_internal.log_call('unsubscribe',
		format('subscription "%s" of role "%s", with %s failed or waiting events', subscription, locked.owner, dead));
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency.unsubscribe(text) IS
	'delete a subscription and its parked events; true if there was one';

-- ---------------------------------------------------------------------------
-- Batches
-- ---------------------------------------------------------------------------

-- Nothing may discard a write silently: events would be lost.
CREATE FUNCTION idempotency_internal.raise_altered(relation text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('55000', format('table "idempotency.%s" has been altered', $1),
		'A trigger, a rule or a policy has discarded a row.', 'Drop it.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_altered(text) IS '55000: a row was not written';

-- Writes a changed position, in place of the version that was read under the partition's lock; without
-- events of a batch, without its lease.  The number of an empty batch stays for a late ack().
CREATE FUNCTION idempotency_internal.put_position(p idempotency.position)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	IF p.batch IS NULL THEN
		p.size := 0;
	END IF;
	IF p.size = 0 THEN
		p.leased_at := NULL;
		p.leased_until := NULL;
		p.holder := NULL;
	END IF;
	UPDATE idempotency.position AS o SET
		(version, changed_at, system_identifier, relation, base, born, mark, top, xids, froms, range_from, upto, upto_born, upto_mark, reached,
			former_base, former_top, skip, ended, events, size, retried, failures, alone, batch, leased_at, leased_until, holder, acknowledged, failed, failing_since)
		= ROW (p.version + 1, clock_timestamp(), p.system_identifier, p.relation, p.base, p.born, p.mark, p.top, p.xids, p.froms, p.range_from,
			p.upto, p.upto_born, p.upto_mark, p.reached, p.former_base, p.former_top, p.skip, p.ended, p.events, p.size, p.retried, p.failures,
			p.alone, p.batch, p.leased_at, p.leased_until, p.holder, p.acknowledged, p.failed, p.failing_since)
	WHERE o.subscription = p.subscription AND o.partition = p.partition AND o.version = p.version;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise_altered('position');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.put_position(idempotency.position) IS 'write a position';

-- Of the live events of an aggregate, the earliest is scheduled, and all others wait: whatever
-- writes the table of parked events calls this.  "wanted" is when the event "seq" is retried.
CREATE FUNCTION idempotency_internal.schedule_queue(name text, aggregate text, p_seq bigint, wanted timestamptz)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	first bigint;
BEGIN
	SELECT k.seq INTO first FROM idempotency.parked AS k
	WHERE k.subscription = name AND k.queue = aggregate AND k.dead_at IS NULL
	ORDER BY k.seq LIMIT 1;
	UPDATE idempotency.parked AS k SET retry_at = NULL
	WHERE k.subscription = name AND k.queue = aggregate AND k.retry_at IS NOT NULL AND k.seq <> first;
	UPDATE idempotency.parked AS k SET retry_at = CASE k.seq WHEN p_seq THEN wanted ELSE clock_timestamp() END
	WHERE k.subscription = name AND k.seq = first AND k.retry_at IS NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.schedule_queue(text, text, bigint, timestamptz) IS 'schedule the earliest event of an aggregate';

-- Whether a partition has events that failed and are retried.
CREATE FUNCTION idempotency_internal.has_failed(p idempotency.position, but bigint)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN EXISTS (SELECT FROM idempotency.parked AS k
		WHERE k.subscription = (p).subscription AND k.partition = (p).partition AND k.retry_at IS NOT NULL AND k.attempts > 0 AND k.seq <> but);
COMMENT ON FUNCTION idempotency_internal.has_failed(idempotency.position, bigint) IS 'whether another event than this one is retried';

-- Parks an event of the batch that failed, with all later events of its aggregate in the list.
-- An event that cannot be found any more only leaves the list.
CREATE FUNCTION idempotency_internal.fail_event(
	s idempotency.subscription, INOUT p idempotency.position, p_seq bigint, p_error text, retry_in interval, is_final boolean, was_alone boolean,
	OUT retry_at timestamptz)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	now timestamptz := clock_timestamp();
	behind bigint[];
	leaving bigint[];
	event idempotency.parked;
	aggregate text;
BEGIN
	-- Those that leave the list, and copies of those that are in the log
	SELECT coalesce(k.aggregateid, o.aggregateid) INTO aggregate
	FROM (SELECT p_seq AS seq) AS l
	LEFT JOIN idempotency.parked AS k ON k.subscription = p.subscription AND k.seq = l.seq
	LEFT JOIN idempotency.outbox AS o ON o.seq = l.seq;
	leaving := ARRAY[p_seq];
	IF aggregate IS NOT NULL THEN
		behind := p.events[array_position(p.events, p_seq) + 1 :];
		leaving := leaving || ARRAY(SELECT o.seq FROM idempotency.outbox AS o WHERE o.seq = ANY (behind) AND o.aggregateid = aggregate)
			|| ARRAY(SELECT k.seq FROM idempotency.parked AS k
				WHERE k.subscription = p.subscription AND k.seq = ANY (behind) AND k.aggregateid = aggregate);
	END IF;
	UPDATE idempotency.parked AS k SET
		attempts = k.attempts + p.failures,
		retry_at = CASE WHEN k.dead_at IS NOT NULL AND k.queue IS NULL THEN now ELSE k.retry_at END,
		dead_at = NULL
	WHERE k.subscription = p.subscription AND k.seq = ANY (leaving);
	INSERT INTO idempotency.parked (subscription, partition, seq, published_at, id, bucket, bytes, queue, aggregatetype, aggregateid,
		type, payload, headers, attempts, alone, retry_at)
	SELECT p.subscription, p.partition, o.seq, o.published_at, o.id, o.bucket, o.bytes, CASE WHEN o.deliver_at IS NULL THEN o.aggregateid END,
		o.aggregatetype, o.aggregateid, o.type, o.payload, o.headers, p.failures, false,
		CASE WHEN o.deliver_at IS NOT NULL OR o.aggregateid IS NULL THEN now END
	FROM idempotency.outbox AS o
	WHERE o.seq = ANY (leaving)
	ON CONFLICT (subscription, seq) DO NOTHING;
	IF EXISTS (SELECT FROM idempotency.outbox AS o
		WHERE o.seq = ANY (leaving) AND NOT EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = o.seq)) THEN
		PERFORM idempotency_internal.raise_altered('parked');
	END IF;

	-- The event that failed
	SELECT * INTO event FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = p_seq;
	is_final := is_final OR event.attempts + 1 >= s.max_attempts;
	IF NOT is_final THEN
		-- in seconds, at most a century: the product of an interval can be out of range
		retry_at := now + coalesce(retry_in, make_interval(secs => (0.5 + random() / 2) * least(3155760000,
			extract(epoch FROM s.max_retry_delay)::double precision,
			extract(epoch FROM s.retry_delay)::double precision * power(2, least(event.attempts, 30)))));
	END IF;
	UPDATE idempotency.parked AS k SET
		attempts = event.attempts + 1,
		alone = was_alone,
		error = idempotency_internal.clipped_error(p_error),
		first_failed_at = coalesce(event.first_failed_at, now),
		last_failed_at = now,
		retry_at = CASE WHEN event.queue IS NULL THEN fail_event.retry_at END,
		dead_at = CASE WHEN is_final THEN now END
	WHERE k.subscription = p.subscription AND k.seq = p_seq;
	IF event.queue IS NOT NULL THEN
		PERFORM idempotency_internal.schedule_queue(p.subscription, event.queue, p_seq, retry_at);
	ELSIF aggregate IS NOT NULL THEN
		PERFORM idempotency_internal.schedule_queue(p.subscription, aggregate, NULL, NULL);
	END IF;

	-- The log has one line when events begin to fail, and one when they do no longer, both at most once a minute.
	IF p.failing_since IS NULL OR p.failing_since < now - interval '1 minute' AND event.attempts = 0 AND NOT idempotency_internal.has_failed(p, p_seq) THEN
		RAISE LOG 'events of idempotency subscription "%" fail in partition %, first event %', p.subscription, p.partition, event.id USING
			DETAIL = coalesce(left(p_error, 500), ''),
			HINT = 'The views idempotency.subscriptions and idempotency.dead_letters show how many, and the last error.';
		p.failing_since := now;
	END IF;

	-- What is left of the batch
	p.failed := p.failed + 1;
	PERFORM idempotency_internal.count_events('failed', 1), idempotency_internal.count_events('dead_letters', is_final::integer);
	p.size := p.size - (SELECT count(*) FROM unnest(p.events[1 : p.size]) AS l (seq) WHERE l.seq = ANY (leaving));
	p.events := ARRAY(SELECT l.seq FROM unnest(p.events) WITH ORDINALITY AS l (seq, n) WHERE l.seq <> ALL (leaving) ORDER BY l.n);
END
$$;
COMMENT ON FUNCTION idempotency_internal.fail_event(idempotency.subscription, idempotency.position, bigint, text, interval, boolean, boolean) IS
	'park an event that failed, with the later ones of its aggregate';

-- Fills an empty list with parked events that are due, each with those that wait behind it.  An
-- event that was alone when a lease ended is delivered alone again.
CREATE FUNCTION idempotency_internal.take_parked(INOUT p idempotency.position, max_events integer, INOUT max_bytes bigint)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	head record;
	next record;
BEGIN
	FOR head IN
		SELECT k.seq, k.queue, k.alone, k.bytes FROM idempotency.parked AS k
		WHERE k.subscription = p.subscription AND k.partition = p.partition AND k.retry_at <= clock_timestamp()
		ORDER BY k.retry_at, k.seq
		LIMIT max_events
	LOOP
		EXIT WHEN p.events <> '{}' AND (head.alone OR head.bytes > max_bytes OR cardinality(p.events) >= max_events);
		p.events := p.events || head.seq;
		p.retried := true;
		p.alone := head.alone;
		max_bytes := max_bytes - head.bytes;
		EXIT WHEN head.alone;
		FOR next IN
			SELECT k.seq, k.alone, k.bytes FROM idempotency.parked AS k
			WHERE k.subscription = p.subscription AND k.queue = head.queue AND k.dead_at IS NULL AND k.seq > head.seq
			ORDER BY k.seq
			LIMIT max_events - cardinality(p.events)
		LOOP
			EXIT WHEN next.alone OR next.bytes > max_bytes;
			p.events := p.events || next.seq;
			max_bytes := max_bytes - next.bytes;
		END LOOP;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.take_parked(idempotency.position, integer, bigint) IS 'add parked events that are due to the list';

-- Deletes the partitions before a change of their number when they have delivered everything,
-- so that those after it begin.  These get the parked events, which keep their order by aggregate.
CREATE FUNCTION idempotency_internal.end_generation(name text, oldest integer)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	locked integer[];
BEGIN
	-- Before the locks, which a fetch() that waits must not have, and under them
	FOR look IN 1 .. 2 LOOP
		IF EXISTS (
				SELECT FROM idempotency.partition AS a
				CROSS JOIN LATERAL (SELECT n.* FROM idempotency.position AS n
					WHERE n.subscription = a.subscription AND n.partition = a.partition ORDER BY n.version DESC LIMIT 1) AS n
				WHERE a.subscription = name AND a.generation = oldest AND (a.partition <> ALL (locked) OR NOT n.ended OR n.events <> '{}')) THEN
			RETURN false;
		ELSIF look = 1 THEN
			locked := ARRAY(SELECT a.partition FROM idempotency.partition AS a
				WHERE a.subscription = name AND a.generation = oldest AND a.stop IS NOT NULL FOR UPDATE SKIP LOCKED);
		END IF;
	END LOOP;
	IF locked = '{}' THEN
		RETURN false;
	END IF;
	UPDATE idempotency.parked AS k SET partition = a.partition
	FROM idempotency.partition AS a
	WHERE k.subscription = name AND k.dead_at IS NULL AND a.subscription = name AND a.remainder = k.bucket % a.modulus
		AND a.generation = (SELECT min(g.generation) FROM idempotency.partition AS g WHERE g.subscription = name AND g.generation > oldest);
	DELETE FROM idempotency.position AS n WHERE n.subscription = name AND n.partition = ANY (locked);
	DELETE FROM idempotency.partition AS a WHERE a.subscription = name AND a.partition = ANY (locked);
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency_internal.end_generation(text, integer) IS
	'delete partitions that have delivered everything up to their end';

-- Takes the next batch of a partition that the transaction has locked, and returns its position, whose
-- batch is NULL if there are no events.
CREATE FUNCTION idempotency_internal.next_batch(
	s idempotency.subscription, part idempotency.partition, INOUT p idempotency.position, number bigint, max_events integer, max_bytes bigint,
	now timestamptz, lease_end timestamptz, drawn bigint, born xid8)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	has_parked boolean;
	taken record;
BEGIN
	-- A batch whose lease is over has failed.  From the second time on its events are delivered
	-- one by one, and then one fails by itself.
	IF p.size > 0
		AND NOT (p.leased_until = 'infinity' AND idempotency_internal.was_given_back(p.batch))
	THEN
		PERFORM idempotency_internal.count_events('batches_expired', 1);
		IF p.alone THEN
			RAISE LOG 'a consumer of idempotency subscription "%" ended, or its lease did, while it had the event with number % alone',
				s.subscription, p.events[1];
			p := (idempotency_internal.fail_event(s, p, p.events[1],
				CASE WHEN isfinite(p.leased_until) THEN format('the lease ended without ack() or nack(); process %s had the event', p.holder)
					ELSE 'the worker ended while it handled this event' END, NULL, false, true)).p;
		ELSE
			p.failures := p.failures + 1;
			p.failed := p.failed + p.size;
			p.alone := p.failures >= 2;
			PERFORM idempotency_internal.count_events('failed', p.size);
		END IF;
	END IF;
	p.batch := NULL;
	IF p.events = '{}' THEN
		p.failures := 0;
		p.alone := false;
		p.retried := false;
		-- of events that live, one is scheduled
		has_parked := EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.retry_at IS NOT NULL);
		IF has_parked THEN
			taken := idempotency_internal.take_parked(p, max_events, max_bytes);
			p := taken.p;
			max_bytes := taken.max_bytes;
		END IF;
		IF NOT p.alone THEN
			p := idempotency_internal.read_log(p, part, s.patterns, max_events, max_bytes, drawn, born, has_parked);
		END IF;
	END IF;
	IF p.events <> '{}' THEN
		p.size := CASE WHEN p.alone THEN 1 ELSE cardinality(p.events) END;
		p.batch := number;
		p.leased_at := now;
		p.leased_until := lease_end;
		p.holder := pg_backend_pid();
	END IF;
	PERFORM idempotency_internal.put_position(p);
END
$$;
COMMENT ON FUNCTION idempotency_internal.next_batch(idempotency.subscription, idempotency.partition, idempotency.position, bigint, integer, bigint,
	timestamptz, timestamptz, bigint, xid8) IS
	'take the next batch of a locked partition';

-- The partitions from which fetch() can take something.
CREATE FUNCTION idempotency_internal.due_partitions(s idempotency.subscription)
	RETURNS SETOF integer
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT a.partition
	FROM idempotency.partition AS a
	CROSS JOIN LATERAL (SELECT o AS position FROM idempotency.position AS o
		WHERE o.subscription = a.subscription AND o.partition = a.partition ORDER BY o.version DESC LIMIT 1) AS n
	WHERE a.subscription = $1.subscription AND $1.paused_at IS NULL
		AND a.generation = (SELECT min(g.generation) FROM idempotency.partition AS g WHERE g.subscription = $1.subscription)
		AND idempotency_internal.is_due(n.position, a.stop IS NOT NULL, a.modulus, a.remainder, $1.patterns)
$$;
COMMENT ON FUNCTION idempotency_internal.due_partitions(idempotency.subscription) IS 'partitions that have something for fetch()';

-- When the next parked event is due.  One that is due is in a partition whose batch is out.
-- In PL/pgSQL, so that a session plans it once.
CREATE FUNCTION idempotency_internal.next_retry(name text)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	RETURN (SELECT min(k.retry_at)
		FROM idempotency.partition AS a
		CROSS JOIN LATERAL (SELECT e.retry_at FROM idempotency.parked AS e
			WHERE e.subscription = a.subscription AND e.partition = a.partition AND e.retry_at > clock_timestamp()
			ORDER BY e.retry_at LIMIT 1) AS k
		WHERE a.subscription = name COLLATE "C");
END
$$;
COMMENT ON FUNCTION idempotency_internal.next_retry(text) IS 'when a waiting consumer must look again';

CREATE FUNCTION idempotency_internal.next_due(name text)
	RETURNS timestamptz
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT least(idempotency_internal.next_retry($1), min(n.leased_until))
	FROM idempotency.position AS n
	WHERE n.subscription = $1 COLLATE "C" AND n.leased_until > clock_timestamp() AND isfinite(n.leased_until)
$$;
COMMENT ON FUNCTION idempotency_internal.next_due(text) IS 'when a worker must look again';

-- The subscriptions for which workers can be started, and those that have something to deliver.
CREATE FUNCTION idempotency_internal.survey()
	RETURNS TABLE (subscription text, owner name, topics text[], partitions integer, is_due boolean, due_at timestamptz)
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT s.subscription, s.owner, s.topics, (SELECT max(a.modulus) FROM idempotency.partition AS a WHERE a.subscription = s.subscription),
		EXISTS (SELECT FROM idempotency_internal.due_partitions(s)),
		idempotency_internal.next_due(s.subscription)
	FROM idempotency.subscription AS s
	WHERE s.handler IS NOT NULL
$$;
COMMENT ON FUNCTION idempotency_internal.survey() IS 'subscriptions with a handler';

CREATE FUNCTION idempotency.fetch(
	subscription text, max_events integer DEFAULT 100, wait interval DEFAULT '0', lease interval DEFAULT '30 seconds',
	max_bytes bigint DEFAULT 10485760)
	RETURNS SETOF idempotency.event
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100 SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
	s idempotency.subscription;
	deadline timestamptz := clock_timestamp() + wait;
	pause double precision := 0.01;
	now timestamptz;
	lease_end timestamptz;
	next record;
	part idempotency.partition;
	p idempotency.position;
	drawn bigint;
	born xid8;
	start bigint;
	number bigint;
	numbers bigint[];
	oldest integer;
	is_ending boolean;
	changed boolean;
	moved boolean := false;
BEGIN
	-- Check the arguments
	IF (max_events >= 1) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', 'max_events must be positive', NULL, 'Pass the maximum number of events.');
	ELSIF (max_bytes >= 1) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', 'max_bytes must be positive', NULL, 'Pass the maximum number of bytes; one event always fits.');
	ELSIF wait < interval '0' THEN
		PERFORM idempotency_internal.raise('22023', 'wait must not be negative', NULL, 'Pass 0 to not wait.');
	ELSIF (lease > interval '0' AND lease < interval '1 day') IS NOT TRUE THEN
		PERFORM idempotency_internal.check_lease(coalesce(lease, '0'));
	END IF;
	s := idempotency_internal.subscription_of(subscription);
	PERFORM idempotency_internal.check_transaction('fetch');

	-- Choose a partition of the oldest generation that has something and no batch in flight (is_due()); of
	-- several, the one that changed least recently.  It is locked until the end of the transaction; one that
	-- has nothing is not locked.
	LOOP
		-- the clock was set back: the deadline is too far away now
		EXIT WHEN clock_timestamp() < now;
		IF wait > interval '0' THEN
			PERFORM idempotency_internal.listen(s.topics);
		END IF;
		now := clock_timestamp();
		lease_end := now + lease;
		IF idempotency_internal.is_worker_fetch() THEN
			lease_end := 'infinity';
		END IF;
		oldest := NULL;
		is_ending := false;
		changed := false;
		FOR next IN
			SELECT a.generation, a.modulus, a.remainder, a.stop IS NOT NULL AS is_ending, n.position,
				EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = a.subscription AND k.retry_at IS NOT NULL) AS has_parked
			FROM idempotency.partition AS a
			CROSS JOIN LATERAL (SELECT o AS position, o.changed_at FROM idempotency.position AS o
				WHERE o.subscription = a.subscription AND o.partition = a.partition
				ORDER BY o.version DESC LIMIT 1) AS n
			WHERE a.subscription = s.subscription AND s.paused_at IS NULL
			ORDER BY a.generation, n.changed_at
		LOOP
			EXIT WHEN next.generation > oldest;
			oldest := next.generation;
			is_ending := next.is_ending;
			p := next.position;
			CONTINUE WHEN NOT idempotency_internal.is_due(p, is_ending, next.modulus, next.remainder, s.patterns);
			-- before the lock, which gives the transaction its id
			IF p.upto IS NULL AND born IS NULL THEN
				drawn := coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0);
				born := idempotency_internal.next_id();
			END IF;
			SELECT * INTO part FROM idempotency.partition AS a
			WHERE a.subscription = p.subscription AND a.partition = p.partition
			FOR UPDATE SKIP LOCKED;
			CONTINUE WHEN NOT FOUND;
			-- The low ten bits are the partition.  Not random(), which setseed() makes repeat.
			number := (('x' || translate(left(gen_random_uuid()::text, 13), '-', ''))::bit(48)::bigint & 4398046511103) + 1 << 10 | p.partition;

			-- In one statement, a full batch without gaps from the middle of a window, if nothing is parked, and
			-- subscription and position are still those that were read before the lock.
			IF p.upto IS NOT NULL AND p.former_base IS NULL AND p.events = '{}' AND NOT next.has_parked THEN
				start := greatest(p.reached, p.skip);
				RETURN QUERY
					WITH batch AS MATERIALIZED (
						SELECT array_agg(e.seq) AS events, min(e.seq) AS first, max(e.seq) AS last
						FROM (SELECT o.seq, o.bytes, o.deliver_at
							FROM idempotency.outbox AS o
							WHERE o.seq > start AND o.seq <= least(p.top - 1, start + 20000)
								AND pg_visible_in_snapshot(o.txid, p.upto) AND NOT pg_visible_in_snapshot(o.txid, p.base)
								AND (part.modulus = 1 OR o.bucket % part.modulus = part.remainder) AND o.aggregatetype LIKE ANY (s.patterns)
							ORDER BY o.seq
							LIMIT max_events) AS e
						HAVING count(*) = max_events AND max(e.seq) - min(e.seq) = max_events - 1 AND count(e.deliver_at) = 0
							AND sum(e.bytes) <= max_bytes
							AND EXISTS (SELECT FROM idempotency.subscription AS c
								WHERE c.subscription = s.subscription AND c.paused_at IS NULL AND c.patterns = s.patterns)
							AND NOT EXISTS (SELECT FROM idempotency.parked AS k WHERE k.subscription = s.subscription AND k.retry_at IS NOT NULL)),
					written AS MATERIALIZED (
						UPDATE idempotency.position AS n SET
							version = n.version + 1, changed_at = now, reached = b.last, events = b.events, size = max_events, retried = false, failures = 0,
							alone = false, batch = number, leased_at = now, leased_until = lease_end, holder = pg_backend_pid()
						FROM batch AS b
						WHERE n.subscription = p.subscription AND n.partition = p.partition AND n.version = p.version AND n.changed_at = p.changed_at
						RETURNING b.first, b.last)
					SELECT number, o.seq, o.id, o.aggregatetype::text, o.aggregateid::text, o.type::text, o.payload, o.headers, 1, o.published_at
					FROM idempotency.outbox AS o
					WHERE o.seq >= (SELECT w.first FROM written AS w) AND o.seq <= (SELECT w.last FROM written AS w)
					ORDER BY o.seq;
				IF FOUND THEN
					PERFORM idempotency_internal.count_events('delivered', max_events);
					RETURN;
				END IF;
			END IF;

			-- as they are under the lock
			SELECT * INTO s FROM idempotency.subscription AS e
			WHERE e.subscription = part.subscription AND e.paused_at IS NULL AND (p.version, p.changed_at) = (
				SELECT o.version, o.changed_at FROM idempotency.position AS o
				WHERE o.subscription = part.subscription AND o.partition = part.partition
				ORDER BY o.version DESC LIMIT 1);
			changed := NOT FOUND;
			EXIT WHEN changed;
			p := idempotency_internal.next_batch(s, part, p, number, max_events, max_bytes, now, lease_end, drawn, born);
			IF p.batch IS NULL THEN
				moved := true;
				CONTINUE;
			END IF;
			PERFORM idempotency_internal.count_events('delivered', p.size);
			numbers := p.events[1 : p.size];
			IF p.retried THEN
				RETURN QUERY
					SELECT number, l.seq, coalesce(k.id, o.id), coalesce(k.aggregatetype, o.aggregatetype)::text, coalesce(k.aggregateid, o.aggregateid)::text,
						coalesce(k.type, o.type)::text, CASE WHEN k.id IS NULL THEN o.payload ELSE k.payload END, CASE WHEN k.id IS NULL THEN o.headers ELSE k.headers END,
						coalesce(k.attempts, 0) + p.failures + 1, coalesce(k.published_at, o.published_at)
					FROM unnest(numbers) WITH ORDINALITY AS l (seq, n)
					LEFT JOIN idempotency.parked AS k ON k.subscription = p.subscription AND k.seq = l.seq
					LEFT JOIN idempotency.outbox AS o ON o.seq = l.seq
					WHERE k.id IS NOT NULL OR o.id IS NOT NULL
					ORDER BY l.n;
			ELSIF numbers[p.size] - numbers[1] = p.size - 1 THEN
				-- without gaps, reading the range is faster
				RETURN QUERY
					SELECT number, o.seq, o.id, o.aggregatetype::text, o.aggregateid::text, o.type::text, o.payload, o.headers, p.failures + 1, o.published_at
					FROM idempotency.outbox AS o
					WHERE o.seq >= numbers[1] AND o.seq <= numbers[p.size]
					ORDER BY o.seq;
			ELSE
				RETURN QUERY
					SELECT number, o.seq, o.id, o.aggregatetype::text, o.aggregateid::text, o.type::text, o.payload, o.headers, p.failures + 1, o.published_at
					FROM idempotency.outbox AS o
					WHERE o.seq = ANY (numbers)
					ORDER BY o.seq;
			END IF;
			RETURN;
		END LOOP;
		IF changed THEN
			moved := true;
			s := idempotency_internal.subscription_of(subscription);
			CONTINUE;
		ELSIF is_ending AND idempotency_internal.end_generation(s.subscription, oldest) THEN
			moved := true;
			CONTINUE;
		END IF;
		-- the commit must keep the progress, and unlock
		EXIT WHEN moved OR (clock_timestamp() < deadline) IS NOT TRUE;
		PERFORM idempotency_internal.wait_for_event(least(deadline, idempotency_internal.next_retry(subscription)), pause);
		pause := least(pause * 2, 1);
		s := idempotency_internal.subscription_of(subscription);
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency.fetch(text, integer, interval, interval, bigint) IS
	'get the next batch of events';

-- Without events, fetch() can have read a part of the log only.  Partitions that another transaction has
-- locked do not count: a loop would not wait for it.
CREATE FUNCTION idempotency.has_more(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.subscription_of(subscription);
BEGIN
	PERFORM idempotency_internal.check_transaction('has_more');
	PERFORM FROM idempotency.partition AS a
	WHERE a.subscription = s.subscription AND a.partition IN (SELECT idempotency_internal.due_partitions(s))
	LIMIT 1
	FOR UPDATE SKIP LOCKED;
	RETURN FOUND;
END
$$;
COMMENT ON FUNCTION idempotency.has_more(text) IS
	'after a fetch() without events: whether another one can return some';

-- The position of the batch, under the lock of its partition, for a caller that may use the
-- subscription.  Raises IK408 if the batch is not current, and 55P03 if another transaction uses the
-- partition for longer than idempotency.wait.
CREATE FUNCTION idempotency_internal.batch_of(function text, s idempotency.subscription, number bigint)
	RETURNS idempotency.position
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	deadline timestamptz;
	p idempotency.position;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only(function);
	ELSIF number IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'batch is missing', NULL, 'Pass the number that idempotency.fetch() returned.');
	END IF;
	LOOP
		PERFORM FROM idempotency.partition AS a
		WHERE a.subscription = s.subscription AND a.partition = (number & 1023)
		FOR UPDATE SKIP LOCKED;
		EXIT WHEN FOUND OR NOT EXISTS (SELECT FROM idempotency.partition AS a WHERE a.subscription = s.subscription AND a.partition = (number & 1023));
		deadline := coalesce(deadline, clock_timestamp() + idempotency_internal.default_wait());
		IF clock_timestamp() >= deadline THEN
			PERFORM idempotency_internal.raise_in_use(s.subscription);
		END IF;
		PERFORM pg_sleep(0.01);
	END LOOP;
	SELECT * INTO p FROM idempotency.position AS o
	WHERE o.subscription = s.subscription AND o.partition = (number & 1023)
	ORDER BY o.version DESC LIMIT 1;
	IF p.batch IS DISTINCT FROM number THEN
		PERFORM idempotency_internal.raise('IK408', 'this batch is not the current one of its subscription',
			format('Subscription "%s", batch %s.', s.subscription, number),
			'Call idempotency.fetch() for the next batch; to keep one longer, pass a longer lease or call idempotency.extend().');
	END IF;
	RETURN p;
END
$$;
COMMENT ON FUNCTION idempotency_internal.batch_of(text, idempotency.subscription, bigint) IS 'the position of a current batch, locked';

-- Acknowledges events of a batch; NULL: all.
CREATE FUNCTION idempotency_internal.ack_events(subscription text, batch bigint, events bigint[])
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	p idempotency.position;
	done bigint[];
	queue text;
BEGIN
	p := idempotency_internal.batch_of('ack', idempotency_internal.subscription_of(subscription), batch);
	done := p.events[1 : p.size];
	IF ack_events.events IS NOT NULL THEN
		done := ARRAY(SELECT d FROM unnest(done) AS d WHERE d = ANY (ack_events.events));
	END IF;
	IF p.retried THEN
		FOR queue IN
			WITH gone AS (DELETE FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = ANY (done) RETURNING k.queue)
			SELECT DISTINCT g.queue FROM gone AS g WHERE g.queue IS NOT NULL
		LOOP
			PERFORM idempotency_internal.schedule_queue(p.subscription, queue, NULL, NULL);
		END LOOP;
	END IF;
	IF p.failing_since < clock_timestamp() - interval '1 minute' AND done <> '{}' AND NOT idempotency_internal.has_failed(p, 0) THEN
		RAISE LOG 'events of idempotency subscription "%" no longer fail in partition %; they did since %', p.subscription, p.partition, p.failing_since;
		p.failing_since := NULL;
	END IF;
	p.acknowledged := p.acknowledged + cardinality(done);
	PERFORM idempotency_internal.count_events('acknowledged', cardinality(done));
	IF ack_events.events IS NOT NULL THEN
		p.events := ARRAY(SELECT e.seq FROM unnest(p.events) WITH ORDINALITY AS e (seq, n) WHERE e.seq <> ALL (done) ORDER BY e.n);
		p.size := p.size - cardinality(done);
	ELSE
		p.events := p.events[p.size + 1 :];
		p.batch := NULL;
	END IF;
	PERFORM idempotency_internal.put_position(p);
	RETURN cardinality(done);
END
$$;
COMMENT ON FUNCTION idempotency_internal.ack_events(text, bigint, bigint[]) IS 'acknowledge events of a batch';

CREATE FUNCTION idempotency.ack(subscription text, batch bigint)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	state record;
BEGIN
	-- In two statements, a batch that is all of the list and has no parked events, if nothing failed before
	IF current_setting('transaction_read_only') = 'off' THEN
		SELECT s.owner, n.version, n.size INTO state
		FROM idempotency.subscription AS s
		JOIN idempotency.partition AS a ON a.subscription = s.subscription AND a.partition = (ack.batch & 1023)
		CROSS JOIN LATERAL (SELECT o.version, o.size, o.batch, o.alone, o.retried, o.failing_since FROM idempotency.position AS o
			WHERE o.subscription = a.subscription AND o.partition = a.partition ORDER BY o.version DESC LIMIT 1) AS n
		WHERE s.subscription = ack.subscription COLLATE "C" AND n.batch = ack.batch AND NOT n.alone AND NOT n.retried AND n.failing_since IS NULL
		FOR UPDATE OF a SKIP LOCKED;
		IF state.owner = idempotency_internal.caller() THEN
			UPDATE idempotency.position AS n SET
				version = n.version + 1, changed_at = clock_timestamp(), events = '{}', size = 0, batch = NULL, leased_at = NULL,
				leased_until = NULL, holder = NULL, acknowledged = n.acknowledged + n.size
			WHERE n.subscription = ack.subscription COLLATE "C" AND n.partition = (ack.batch & 1023)
				AND n.version = state.version AND n.batch = ack.batch;
			IF FOUND THEN
				PERFORM idempotency_internal.count_events('acknowledged', state.size);
				RETURN state.size;
			END IF;
		END IF;
	END IF;
	RETURN idempotency_internal.ack_events(subscription, batch, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.ack(text, bigint) IS
	'acknowledge what the batch still has; returns the number of events';

-- A form of its own: a list without elements is NULL for array_agg(), and not all events.
CREATE FUNCTION idempotency.ack(subscription text, batch bigint, events bigint[])
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
BEGIN
	IF events IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'events are missing', NULL, 'Pass their numbers, or leave them out to acknowledge all of the batch.');
	END IF;
	RETURN idempotency_internal.ack_events(subscription, batch, events);
END
$$;
COMMENT ON FUNCTION idempotency.ack(text, bigint, bigint[]) IS
	'acknowledge some events of the batch; returns their number';

CREATE FUNCTION idempotency.nack(
	subscription text, batch bigint, event_id uuid, error text DEFAULT NULL, retry_in interval DEFAULT NULL, dead boolean DEFAULT false)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET plan_cache_mode = force_generic_plan SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.subscription_of(subscription);
	p idempotency.position := idempotency_internal.batch_of('nack', s, batch);
	numbers bigint[];
	twins bigint[];
	event bigint;
	retry_at timestamptz;
	failed record;
BEGIN
	IF retry_in < interval '0' THEN
		PERFORM idempotency_internal.raise('22023', 'retry_in must not be negative', NULL,
			'Pass 0 for a retry at once, or NULL for the subscription''s delay.');
	ELSIF event_id IS NULL THEN
		-- the list stays, for the next fetch()
		p.batch := NULL;
		PERFORM idempotency_internal.put_position(p);
		RETURN clock_timestamp();
	END IF;
	numbers := p.events[1 : p.size];
	twins := ARRAY(SELECT o.seq FROM idempotency.outbox AS o WHERE o.seq = ANY (numbers) AND o.id = event_id)
		|| ARRAY(SELECT k.seq FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.seq = ANY (numbers) AND k.id = event_id);
	IF twins = '{}' THEN
		-- It has left the batch, by an earlier call or behind one that failed: nothing changes
		SELECT CASE WHEN k.dead_at IS NULL THEN coalesce(k.retry_at, (SELECT h.retry_at FROM idempotency.parked AS h
			WHERE h.subscription = k.subscription AND h.queue = k.queue AND h.retry_at IS NOT NULL)) END
		INTO retry_at
		FROM idempotency.parked AS k WHERE k.subscription = p.subscription AND k.partition = p.partition AND k.id = event_id;
		IF FOUND THEN
			RETURN retry_at;
		END IF;
		PERFORM idempotency_internal.raise('22023', format('event %s is not in the batch', event_id),
			format('Subscription "%s", batch %s.', subscription, batch), 'Pass the id of an event that has not left the batch.');
	END IF;
	-- Of events with the same id, any can be the one that failed: none may be acknowledged with the rest
	twins := ARRAY(SELECT l.seq FROM unnest(numbers) WITH ORDINALITY AS l (seq, n) WHERE l.seq = ANY (twins) ORDER BY l.n);
	FOREACH event IN ARRAY twins LOOP
		-- not behind one of its aggregate that has left
		CONTINUE WHEN event <> ALL (p.events[1 : p.size]);
		failed := idempotency_internal.fail_event(s, p, event, error, retry_in, coalesce(dead, false) AND event = twins[1], false);
		p := failed.p;
		IF event = twins[1] THEN
			retry_at := failed.retry_at;
			-- the others are never buried by this
			s.max_attempts := 2147483647;
		END IF;
	END LOOP;
	PERFORM idempotency_internal.put_position(p);
	RETURN retry_at;
END
$$;
COMMENT ON FUNCTION idempotency.nack(text, bigint, uuid, text, interval, boolean) IS
	'report that an event of the batch failed; returns when it is retried, NULL if never';

CREATE FUNCTION idempotency.extend(subscription text, batch bigint, lease interval)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	p idempotency.position;
BEGIN
	PERFORM idempotency_internal.check_lease(coalesce(lease, '0'));
	p := idempotency_internal.batch_of('extend', idempotency_internal.subscription_of(subscription), batch);
	p.leased_at := clock_timestamp();
	p.leased_until := p.leased_at + lease;
	PERFORM idempotency_internal.put_position(p);
	RETURN p.leased_until;
END
$$;
COMMENT ON FUNCTION idempotency.extend(text, bigint, interval) IS
	'extend the lease of a batch; returns when it ends';

-- ---------------------------------------------------------------------------
-- Operating subscriptions
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.pause(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency_internal.locked_subscription('pause', subscription);
	UPDATE idempotency.subscription AS s SET paused_at = clock_timestamp()
	WHERE s.subscription = pause.subscription COLLATE "C" AND s.paused_at IS NULL;
	IF FOUND THEN
		PERFORM idempotency_internal.log_call('pause', format('subscription "%s"', subscription));
		RETURN true;
	END IF;
	RETURN false;
END
$$;
COMMENT ON FUNCTION idempotency.pause(text) IS 'deliver nothing until resume(); batches that are out can be acknowledged; false if it was paused';

CREATE FUNCTION idempotency.resume(subscription text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency_internal.locked_subscription('resume', subscription);
	UPDATE idempotency.subscription AS s SET paused_at = NULL
	WHERE s.subscription = resume.subscription COLLATE "C" AND s.paused_at IS NOT NULL;
	IF FOUND THEN
		PERFORM idempotency_internal.log_call('resume', format('subscription "%s"', subscription));
		RETURN true;
	END IF;
	RETURN false;
END
$$;
COMMENT ON FUNCTION idempotency.resume(text) IS 'deliver again after pause(); false if it was not paused';

-- The number of the last event before the first one published at that time or later.  The numbers after it, and those
-- of an empty outbox, can be of transactions in progress.
CREATE FUNCTION idempotency_internal.number_before(since timestamptz)
	RETURNS bigint
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT coalesce(max(o.seq), 0) FROM idempotency.outbox AS o
	WHERE o.seq < coalesce((SELECT min(y.seq) FROM idempotency.outbox AS y WHERE y.published_at >= $1), 9223372036854775807)
$$;
COMMENT ON FUNCTION idempotency_internal.number_before(timestamptz) IS 'the number of the last event before a time';

-- Batches that are out end: their consumers get IK408.  Parked events and dead letters that the log
-- delivers again are deleted, so that no event comes twice, and so are parked events that are skipped.
CREATE FUNCTION idempotency_internal.move_subscription(name text, since timestamptz)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.locked_subscription('seek', name);
	count integer := (SELECT a.modulus FROM idempotency.partition AS a WHERE a.subscription = name AND a.stop IS NULL LIMIT 1);
	target bigint := CASE WHEN since > '-infinity' AND isfinite(since) THEN idempotency_internal.number_before(since) ELSE 0 END;
	dropped bigint;
BEGIN
	-- a write, which keeps the reaper out
	UPDATE idempotency.subscription AS e SET created_at = e.created_at WHERE e.subscription = name;
	DELETE FROM idempotency.partition AS a WHERE a.subscription = name;
	DELETE FROM idempotency.position AS n WHERE n.subscription = name;
	IF since = 'infinity' THEN
		PERFORM idempotency_internal.create_partitions_now(name, count);
	ELSE
		PERFORM idempotency_internal.create_partitions(name, count, '1:1:', '1', 0, 0, NULL);
		UPDATE idempotency.position AS n SET skip = target WHERE n.subscription = name;
	END IF;
	DELETE FROM idempotency.parked AS k
	WHERE k.subscription = name AND CASE
		WHEN since = 'infinity' OR k.seq <= target THEN k.dead_at IS NULL
		ELSE k.published_at < since AND k.dead_at IS NULL OR EXISTS (SELECT FROM idempotency.outbox AS o
			WHERE o.seq = k.seq AND o.aggregatetype LIKE ANY (s.patterns))
	END;
	GET DIAGNOSTICS dropped = ROW_COUNT;
	UPDATE idempotency.parked AS k SET partition = a.partition
	FROM idempotency.partition AS a
	WHERE k.subscription = name AND a.subscription = name AND a.remainder = k.bucket % a.modulus AND k.partition <> a.partition;
	-- those whose first event was deleted
	PERFORM idempotency_internal.schedule_queue(name, q.queue, NULL, NULL)
	FROM (SELECT DISTINCT k.queue FROM idempotency.parked AS k WHERE k.subscription = name AND k.dead_at IS NULL AND k.queue IS NOT NULL) AS q;
	PERFORM idempotency_internal.log_call('seek', format('subscription "%s" moved to %s, past %s failed or waiting events', name,
		CASE since WHEN 'infinity' THEN 'now' WHEN '-infinity' THEN 'the beginning' ELSE since::text END, dropped));
	RETURN dropped;
END
$$;
COMMENT ON FUNCTION idempotency_internal.move_subscription(text, timestamptz) IS 'move a subscription to a time; infinity: now; returns how many failed or waiting events it dropped';

CREATE FUNCTION idempotency.seek(subscription text, target timestamptz)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF target IS NULL OR target = 'infinity' THEN
		PERFORM idempotency_internal.raise('22023', 'target is missing', NULL, 'Pass a time, ''beginning'' or ''now''.');
	END IF;
	RETURN idempotency_internal.move_subscription(subscription, target);
END
$$;
COMMENT ON FUNCTION idempotency.seek(text, timestamptz) IS 'deliver the events that were published from a time on; returns how many failed or waiting events it dropped';

CREATE FUNCTION idempotency.seek(subscription text, target text)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF target = 'now' OR target = 'beginning' THEN
		RETURN idempotency_internal.move_subscription(subscription, CASE target WHEN 'now' THEN timestamptz 'infinity' ELSE '-infinity' END);
	END IF;
	RETURN idempotency.seek(subscription, target::timestamptz);
END
$$;
COMMENT ON FUNCTION idempotency.seek(text, text) IS
	'deliver from the beginning of the outbox, from now, or from a time on; returns how many failed or waiting events it dropped';

-- Dead letters go to the oldest generation of partitions, which is the one that delivers.
CREATE FUNCTION idempotency_internal.redrive_events(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.locked_subscription('redrive', subscription);
	now timestamptz := clock_timestamp();
	queues text[];
	redriven bigint;
	hastened bigint;
	queue text;
BEGIN
	WITH revived AS (
		UPDATE idempotency.parked AS k SET
			partition = a.partition, attempts = 0, alone = false, dead_at = NULL, first_failed_at = NULL,
			retry_at = CASE WHEN k.queue IS NULL THEN now END
		FROM idempotency.partition AS a
		WHERE k.subscription = s.subscription AND k.dead_at IS NOT NULL AND (event_id IS NULL OR k.id = event_id)
			AND a.subscription = k.subscription AND a.remainder = k.bucket % a.modulus
			AND a.generation = (SELECT min(g.generation) FROM idempotency.partition AS g WHERE g.subscription = k.subscription)
		RETURNING k.queue)
	SELECT count(*), array_agg(DISTINCT r.queue) FILTER (WHERE r.queue IS NOT NULL) INTO redriven, queues FROM revived AS r;
	-- Others are due now.  Those that have not failed keep the time that their publisher wants.
	UPDATE idempotency.parked AS k SET retry_at = now
	WHERE k.subscription = s.subscription AND k.retry_at > now AND k.first_failed_at IS NOT NULL AND (event_id IS NULL OR k.id = event_id);
	GET DIAGNOSTICS hastened = ROW_COUNT;
	redriven := redriven + hastened;
	FOREACH queue IN ARRAY coalesce(queues, '{}') LOOP
		PERFORM idempotency_internal.schedule_queue(s.subscription, queue, NULL, NULL);
	END LOOP;
	PERFORM idempotency_internal.count_events('redriven', redriven);
	IF redriven > 0 AND s.handler IS NOT NULL THEN
		PERFORM idempotency_internal.wake_relay(subscription);
	END IF;
	IF redriven > 0 THEN
		PERFORM idempotency_internal.log_call('redrive',
			format('%s %s of subscription "%s"', redriven, CASE redriven WHEN 1 THEN 'event' ELSE 'events' END, subscription));
	END IF;
	RETURN redriven;
END
$$;
COMMENT ON FUNCTION idempotency_internal.redrive_events(text, uuid) IS 'deliver a failed event again, now; NULL: all';

CREATE FUNCTION idempotency.redrive(subscription text)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.redrive_events(subscription, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.redrive(text) IS 'deliver dead letters again, and now what waits for its next attempt; returns how many events';

CREATE FUNCTION idempotency.redrive(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF event_id IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'event_id is missing', NULL, 'Pass the id of an event that failed, or leave it out for all of them.');
	END IF;
	RETURN idempotency_internal.redrive_events(subscription, event_id);
END
$$;
COMMENT ON FUNCTION idempotency.redrive(text, uuid) IS 'deliver one event that failed again, now; returns how many it was';

CREATE FUNCTION idempotency_internal.discard_events(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.locked_subscription('discard', subscription);
	discarded bigint;
BEGIN
	DELETE FROM idempotency.parked AS k
	WHERE k.subscription = s.subscription AND k.dead_at IS NOT NULL AND (event_id IS NULL OR k.id = event_id);
	GET DIAGNOSTICS discarded = ROW_COUNT;
	IF discarded > 0 THEN
		PERFORM idempotency_internal.log_call('discard',
			format('%s %s of subscription "%s"', discarded, CASE discarded WHEN 1 THEN 'dead letter' ELSE 'dead letters' END, subscription));
	END IF;
	RETURN discarded;
END
$$;
COMMENT ON FUNCTION idempotency_internal.discard_events(text, uuid) IS 'delete a dead letter; NULL: all';

CREATE FUNCTION idempotency.discard(subscription text)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.discard_events(subscription, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.discard(text) IS 'delete all dead letters; returns their number';

CREATE FUNCTION idempotency.discard(subscription text, event_id uuid)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF event_id IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'event_id is missing', NULL, 'Pass the id of a dead letter, or leave it out for all of them.');
	END IF;
	RETURN idempotency_internal.discard_events(subscription, event_id);
END
$$;
COMMENT ON FUNCTION idempotency.discard(text, uuid) IS 'delete one dead letter; returns how many it was';

-- Moves the positions of a subscription past events that are older than its max_lag.  Partitions
-- that are in use are left for the next call, and only those are locked that are moved.  Batches
-- that are out stay.
CREATE FUNCTION idempotency_internal.drop_lag(s idempotency.subscription)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	since timestamptz := clock_timestamp() - s.max_lag;
	target bigint;
	part idempotency.partition;
	p idempotency.position;
	unread bigint;
	is_old boolean;
	dropped bigint;
BEGIN
	FOR part IN
		SELECT a.* FROM idempotency.partition AS a WHERE a.subscription = s.subscription
	LOOP
		SELECT * INTO p FROM idempotency.position AS n
		WHERE n.subscription = s.subscription AND n.partition = part.partition
		ORDER BY n.version DESC LIMIT 1;
		-- the first that it has not read is old
		unread := greatest(p.skip, least(p.mark, p.range_from, p.reached, (SELECT min(f) FROM unnest(p.froms) AS f)));
		SELECT o.published_at < since INTO is_old FROM idempotency.outbox AS o
		WHERE o.seq > unread AND NOT pg_visible_in_snapshot(o.txid, p.base)
			AND (pg_visible_in_snapshot(o.txid, p.upto) AND o.seq <= p.reached) IS NOT TRUE
		ORDER BY o.seq LIMIT 1;
		CONTINUE WHEN is_old IS NOT TRUE;
		target := coalesce(target, idempotency_internal.number_before(since));
		SELECT count(*) INTO dropped FROM idempotency.outbox AS o
		WHERE o.seq > unread AND o.seq <= target
			AND NOT pg_visible_in_snapshot(o.txid, p.base)
			AND (pg_visible_in_snapshot(o.txid, p.upto) AND o.seq <= p.reached) IS NOT TRUE
			AND (part.stop IS NULL OR pg_visible_in_snapshot(o.txid, part.stop))
			AND o.bucket % part.modulus = part.remainder AND o.aggregatetype LIKE ANY (s.patterns);
		CONTINUE WHEN dropped = 0;
		PERFORM FROM idempotency.partition AS a
		WHERE a.subscription = s.subscription AND a.partition = part.partition
		FOR UPDATE SKIP LOCKED;
		IF FOUND AND p.version = (SELECT max(n.version) FROM idempotency.position AS n
			WHERE n.subscription = s.subscription AND n.partition = part.partition) THEN
			RAISE LOG 'idempotency subscription "%" dropped events older than its max_lag, up to number %', s.subscription, target;
			PERFORM idempotency_internal.count_events('events_dropped', dropped);
			p.skip := target;
			PERFORM idempotency_internal.put_position(p);
		END IF;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.drop_lag(idempotency.subscription) IS 'skip events that are older than max_lag';

-- Deletes dead letters after their retention, and events of the log that every position has
-- passed and that are older than idempotency.outbox_retention.  A position has passed what its
-- "base" shows up to "top", what it has read of "upto", and all numbers that it can never read
-- again; events in its list are kept.  While a subscription is being created or moved, whose position
-- is invisible, it deletes none, and so it does under an old snapshot.
CREATE FUNCTION idempotency_internal.reap_events(max_rows bigint, retention interval DEFAULT NULL)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
	SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	setting text := idempotency_internal.setting('outbox_retention');
	s idempotency.subscription;
	highest bigint;
	next record;
	leaving tid[] := '{}';
	reaped bigint := 0;
	deleted bigint;
BEGIN
	retention := coalesce(retention, CASE setting WHEN '' THEN interval '24:00:00' ELSE idempotency_internal.duration(setting, 's') END);
	IF retention IS NULL OR retention < interval '0' AND retention <> interval '-1 s' THEN
		PERFORM idempotency_internal.raise_setting('outbox_retention', setting, 'It must be from 0 to 2147483647 seconds, or -1 (forever).',
			'Use an interval such as ''1 day'', or a number of seconds.');
	ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
		RETURN 0;
	END IF;
	BEGIN
		LOCK TABLE idempotency.subscription IN SHARE MODE NOWAIT;
	EXCEPTION
		WHEN lock_not_available THEN
			RETURN 0;
	END;
	FOR s IN SELECT * FROM idempotency.subscription AS e WHERE e.dead_letter_retention IS NOT NULL LOOP
		DELETE FROM idempotency.parked AS k
		WHERE k.ctid = ANY (ARRAY(SELECT e.ctid FROM idempotency.parked AS e
			WHERE e.subscription = s.subscription AND e.dead_at < clock_timestamp() - s.dead_letter_retention
			LIMIT max_rows FOR UPDATE SKIP LOCKED));
		GET DIAGNOSTICS deleted = ROW_COUNT;
		reaped := reaped + deleted;
	END LOOP;
	FOR s IN SELECT * FROM idempotency.subscription AS e WHERE e.max_lag IS NOT NULL LOOP
		PERFORM idempotency_internal.drop_lag(s);
	END LOOP;
	IF retention = interval '-1 s' THEN
		RETURN reaped;
	END IF;

	-- No position has passed a greater number, or few.  A restore loads events before positions, and sets
	-- the sequence after both.
	SELECT least(min(greatest(n.skip, CASE WHEN n.upto IS NULL THEN n.top ELSE n.reached END)),
		coalesce(pg_sequence_last_value('idempotency.outbox_seq'), 0))
	INTO highest
	FROM idempotency.position AS n;
	-- The first young event ends the search, so that it does not read all that are kept
	FOR next IN
		SELECT o.ctid, o.published_at BETWEEN clock_timestamp() - retention AND clock_timestamp() + retention AS is_young,
			EXISTS (SELECT FROM idempotency.position AS n
				WHERE o.seq = ANY (n.events)
					OR o.seq > n.skip
						AND o.seq > CASE WHEN n.former_base IS NOT NULL THEN n.reached
							ELSE least(n.mark, n.range_from, (SELECT min(f) FROM unnest(n.froms) AS f)) END
						AND (n.former_base IS NOT NULL OR o.seq > n.top OR NOT pg_visible_in_snapshot(o.txid, n.base))
						AND (pg_visible_in_snapshot(o.txid, n.upto) AND o.seq <= n.reached) IS NOT TRUE) AS is_needed
		FROM idempotency.outbox AS o
		WHERE o.seq <= highest
		ORDER BY o.seq
	LOOP
		EXIT WHEN next.is_young AND retention > interval '0' OR cardinality(leaving) >= max_rows - reaped;
		IF NOT next.is_needed THEN
			leaving := leaving || next.ctid;
		END IF;
	END LOOP;
	DELETE FROM idempotency.outbox AS o
	WHERE o.ctid = ANY (ARRAY(SELECT l.ctid FROM idempotency.outbox AS l WHERE l.ctid = ANY (leaving) FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS deleted = ROW_COUNT;
	RETURN reaped + deleted;
END
$$;
COMMENT ON FUNCTION idempotency_internal.reap_events(bigint, interval) IS 'delete events that every subscription has passed, and old dead letters';

-- ---------------------------------------------------------------------------
-- deliver: fetch, call the handler, acknowledge
-- ---------------------------------------------------------------------------

-- The stored handler, for the owner only: another role would run it with its own rights.
CREATE FUNCTION idempotency.handler_of(subscription text)
	RETURNS text
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	s idempotency.subscription := idempotency_internal.subscription_of(subscription);
BEGIN
	IF s.handler IS NULL THEN
		PERFORM idempotency_internal.raise('22023', format('subscription "%s" has no handler', subscription), NULL,
			'Pass a function as regprocedure, or store it with idempotency.alter_subscription().');
	ELSIF s.owner <> idempotency_internal.caller() THEN
		PERFORM idempotency_internal.raise('42501', format('only role "%s" can call the stored handler of subscription "%s"', s.owner, subscription),
			'The handler runs with the rights of the role that calls deliver().', 'Pass the handler, or call deliver() as that role.');
	END IF;
	PERFORM idempotency_internal.check_handler_owner(s.handler, s.owner);
	RETURN s.handler;
END
$$;
COMMENT ON FUNCTION idempotency.handler_of(text) IS 'the stored handler of a subscription, for its owner';

-- A key that one event has claimed opens no guarded table for the next one, and is not in the headers of what that publishes.
CREATE FUNCTION idempotency.end_event()
	RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_end_event';
COMMENT ON FUNCTION idempotency.end_event() IS
	'forget which keys this transaction has claimed, for require_claim(), current_key() and publish(); true';

-- Runs with the rights and the search path of its caller, because the handler does, and because
-- a procedure with COMMIT cannot do otherwise; so every name is qualified.
--
-- A transaction has the effects of some events and their acknowledgement: those of a batch, or of
-- 250 ms.  SET CONSTRAINTS checks what an event has deferred, also the commit guard, and then
-- gives those constraints back their mode that are deferred at first.
CREATE PROCEDURE idempotency.deliver(
	subscription text, handler regprocedure DEFAULT NULL, max_events integer DEFAULT 100, duration interval DEFAULT '1 minute',
	lease interval DEFAULT '1 minute', wait interval DEFAULT '0')
	LANGUAGE plpgsql
AS $$
DECLARE
	deadline pg_catalog.timestamptz := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) coalesce(duration, '1000 years');
	routine pg_catalog.record;
	reset pg_catalog.text;
	events idempotency.event[];
	event idempotency.event;
	done pg_catalog.int8[];
	number pg_catalog.int8;
	started_at pg_catalog.timestamptz;
	code pg_catalog.text;
	message pg_catalog.text;
	last pg_catalog.int4;
	acknowledged pg_catalog.int8;
	was_empty pg_catalog.bool := false;
	has_more pg_catalog.bool;
	is_late pg_catalog.bool;
BEGIN
	IF handler IS NULL THEN
		handler := idempotency.handler_of(subscription)::pg_catalog.regprocedure;
	END IF;
	SELECT n.nspname AS schema_name, p.proname AS function_name,
		p.prokind OPERATOR(pg_catalog.=) 'f' AND NOT p.proretset AND p.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.void'::pg_catalog.regtype::pg_catalog.oid
			AND p.pronargs OPERATOR(pg_catalog.=) 1 AND p.proargtypes[0] OPERATOR(pg_catalog.=) 'idempotency.event'::pg_catalog.regtype::pg_catalog.oid AS fits
	INTO routine
	FROM pg_catalog.pg_proc AS p
	JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
	WHERE p.oid OPERATOR(pg_catalog.=) handler::pg_catalog.oid;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = '42883', MESSAGE = pg_catalog.format('handler with OID %s does not exist', handler::pg_catalog.oid),
			HINT = 'Pass a function as regprocedure.';
	ELSIF NOT routine.fits THEN
		RAISE EXCEPTION USING ERRCODE = '42P13', MESSAGE = pg_catalog.format('function %s cannot handle events', handler),
			HINT = 'A handler takes one idempotency.event and returns void.';
	ELSIF NOT pg_catalog.has_function_privilege(handler::pg_catalog.oid, 'EXECUTE') THEN
		RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = pg_catalog.format('permission denied for function %s', routine.function_name);
	END IF;

	WHILE pg_catalog.clock_timestamp() OPERATOR(pg_catalog.<) deadline LOOP
		events := ARRAY(SELECT f FROM idempotency.fetch(subscription, max_events, lease => lease,
			wait => CASE WHEN was_empty AND wait IS NOT NULL
				THEN GREATEST('0', LEAST(wait, deadline OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp())) END) AS f);
		IF pg_catalog.cardinality(events) OPERATOR(pg_catalog.=) 0 THEN
			-- it has passed events of other topics, or found none
			has_more := idempotency.has_more(subscription);
			COMMIT;
			EXIT WHEN NOT has_more AND (was_empty OR (wait OPERATOR(pg_catalog.>) '0'::pg_catalog.interval) IS NOT TRUE);
			was_empty := NOT has_more;
			CONTINUE;
		END IF;
		COMMIT;
		was_empty := false;
		number := events[1].batch;
		done := '{}';
		last := pg_catalog.cardinality(events);
		started_at := pg_catalog.clock_timestamp();
		FOR i IN 1 .. last LOOP
			event := events[i];
			-- Each statement costs what it names.  So all are deferred, and those that are immediate at first are named,
			-- unless these are more, or some cannot be named: in a schema without USAGE, or with a name of one that is not
			-- deferrable.  If constraints with one name differ in their mode, each event has a transaction of its own.
			IF reset IS NULL THEN
				SELECT CASE WHEN pg_catalog.bool_or(c.is_mixed) IS NOT TRUE THEN coalesce(CASE
					WHEN pg_catalog.count(*) FILTER (WHERE c.is_deferred) OPERATOR(pg_catalog.>=) pg_catalog.count(*) FILTER (WHERE NOT c.is_deferred)
						AND pg_catalog.bool_and(c.is_deferred OR c.has_name) AND pg_catalog.bool_or(c.is_deferred)
					THEN pg_catalog.concat('SET CONSTRAINTS ALL DEFERRED',
						'; SET CONSTRAINTS ' OPERATOR(pg_catalog.||) pg_catalog.string_agg(c.name, ', ') FILTER (WHERE NOT c.is_deferred) OPERATOR(pg_catalog.||) ' IMMEDIATE')
					ELSE 'SET CONSTRAINTS ' OPERATOR(pg_catalog.||) pg_catalog.string_agg(c.name, ', ') FILTER (WHERE c.is_deferred AND c.has_name)
						OPERATOR(pg_catalog.||) ' DEFERRED'
				END, '') END INTO reset
				FROM (
					SELECT pg_catalog.format('%I.%I', n.nspname, o.conname) AS name, pg_catalog.bool_or(o.condeferred) AS is_deferred,
						pg_catalog.bool_or(o.condeferred) AND pg_catalog.bool_or(o.condeferrable AND NOT o.condeferred) AS is_mixed,
						pg_catalog.bool_and(o.condeferrable) AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS has_name
					FROM pg_catalog.pg_constraint AS o
					JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) o.connamespace
					-- those of a partition follow those of its parent
					WHERE NOT pg_catalog.pg_is_other_temp_schema(n.oid) AND o.conparentid OPERATOR(pg_catalog.=) 0::pg_catalog.oid
					GROUP BY n.oid, n.nspname, o.conname
					HAVING pg_catalog.bool_or(o.condeferrable)) AS c;
			END IF;
			code := NULL;
			BEGIN
				EXECUTE pg_catalog.format('SELECT %I.%I($1)', routine.schema_name, routine.function_name) USING event;
				SET CONSTRAINTS ALL IMMEDIATE;
				IF reset OPERATOR(pg_catalog.<>) '' THEN
					BEGIN
						EXECUTE reset;
					EXCEPTION
						WHEN undefined_object OR wrong_object_type OR invalid_schema_name THEN
							-- One has changed: look again, in the next transaction
							reset := NULL;
					END;
				END IF;
				IF reset IS NULL THEN
					started_at := 'epoch';
				END IF;
			EXCEPTION
				-- OTHERS is without these; a cancel must end the call
				WHEN OTHERS OR assert_failure THEN
					code := SQLSTATE;
					message := pg_catalog.concat(SQLSTATE, ': ', SQLERRM);
			END;
			is_late := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.>=) deadline;
			IF code IS NULL THEN
				done := done OPERATOR(pg_catalog.||) event.seq;
				PERFORM idempotency.end_event();
				CONTINUE WHEN i OPERATOR(pg_catalog.<) last AND NOT is_late
					AND pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) started_at OPERATOR(pg_catalog.<=) '250 ms'::pg_catalog.interval;
			ELSIF code OPERATOR(pg_catalog.=) ANY ('{IK410,IK412}') THEN
				-- the transaction cannot commit: what it handled goes back
				ROLLBACK;
				done := '{}';
			END IF;
			-- The handler can have acknowledged or failed an event itself: what it wrote for it must not commit.  The events
			-- handled before one that failed are acknowledged, because nack() takes out all that have its id.
			IF pg_catalog.cardinality(done) OPERATOR(pg_catalog.>) 0 THEN
				IF code IS NULL AND i OPERATOR(pg_catalog.=) last THEN
					acknowledged := idempotency.ack(subscription, number);
				ELSE
					acknowledged := idempotency.ack(subscription, number, done);
				END IF;
				IF acknowledged OPERATOR(pg_catalog.<>) pg_catalog.cardinality(done) THEN
					RAISE EXCEPTION USING ERRCODE = 'IK408', MESSAGE = 'an event left its batch while it was handled',
						HINT = 'Raise an error in the handler instead of calling idempotency.nack() or idempotency.ack().';
				END IF;
			END IF;
			IF code IS NOT NULL THEN
				PERFORM idempotency.nack(subscription, number, event.id, message, dead => code OPERATOR(pg_catalog.=) 'IKFIN');
			END IF;
			-- The next fetch() returns what is left behind an event that failed, or when the time is over
			IF code IS NOT NULL OR is_late AND i OPERATOR(pg_catalog.<) last THEN
				PERFORM idempotency.nack(subscription, number, NULL);
				COMMIT;
				EXIT;
			ELSIF i OPERATOR(pg_catalog.<) last THEN
				PERFORM idempotency.extend(subscription, number, lease);
			END IF;
			COMMIT;
			done := '{}';
			started_at := pg_catalog.clock_timestamp();
		END LOOP;
	END LOOP;
END
$$;
COMMENT ON PROCEDURE idempotency.deliver(text, regprocedure, integer, interval, interval, interval) IS
	'call a function for each event of a subscription until none is left, or the time is over';

-- ---------------------------------------------------------------------------
-- What operators see
-- ---------------------------------------------------------------------------

CREATE VIEW idempotency.dead_letters AS
	SELECT
		k.subscription,
		k.id AS event_id,
		k.aggregatetype AS topic,
		k.aggregateid AS aggregate_id,
		k.type,
		k.error,
		k.attempts,
		k.first_failed_at,
		k.last_failed_at,
		k.published_at,
		k.payload,
		k.headers,
		k.seq
	FROM idempotency.parked AS k, (SELECT) AS read_only
	WHERE k.dead_at IS NOT NULL;
COMMENT ON VIEW idempotency.dead_letters IS 'events that are no longer retried; redrive() delivers them again, discard() deletes them';
COMMENT ON COLUMN idempotency.dead_letters.subscription IS 'the subscription in which the event failed';
COMMENT ON COLUMN idempotency.dead_letters.event_id IS 'the event''s id';
COMMENT ON COLUMN idempotency.dead_letters.topic IS 'the topic';
COMMENT ON COLUMN idempotency.dead_letters.aggregate_id IS 'the object of the event';
COMMENT ON COLUMN idempotency.dead_letters.type IS 'the kind of event';
COMMENT ON COLUMN idempotency.dead_letters.error IS 'the last error';
COMMENT ON COLUMN idempotency.dead_letters.attempts IS 'number of deliveries that failed';
COMMENT ON COLUMN idempotency.dead_letters.first_failed_at IS 'when the event first failed';
COMMENT ON COLUMN idempotency.dead_letters.last_failed_at IS 'when the event last failed';
COMMENT ON COLUMN idempotency.dead_letters.published_at IS 'when the event was published';
COMMENT ON COLUMN idempotency.dead_letters.payload IS 'the payload';
COMMENT ON COLUMN idempotency.dead_letters.headers IS 'metadata';
COMMENT ON COLUMN idempotency.dead_letters.seq IS 'the event''s number in the outbox';

-- The first event of a partition that was published and is neither read nor in its list; see
-- scan.sql.  The planner expects few rows from conditions, and would sort all unread events, with
-- JIT compilation; it expects half of the rows from CASE.
CREATE VIEW idempotency.partitions AS
	SELECT
		a.subscription,
		a.remainder AS partition,
		a.modulus AS partitions,
		CASE
			WHEN a.generation > min(a.generation) OVER (PARTITION BY a.subscription) THEN 'waiting'
			WHEN s.paused_at IS NOT NULL THEN 'paused'
			WHEN a.stop IS NOT NULL THEN 'ending'
			ELSE 'delivering'
		END AS state,
		date_trunc('second', clock_timestamp() - least(unread.published_at, listed.published_at)) AS lag,
		coalesce(last.seq - unread.seq + 1, 0) + cardinality(n.events) AS lag_events,
		n.size AS batch_events,
		CASE WHEN n.size > 0 THEN n.failures + 1 END AS attempt,
		n.holder,
		n.leased_at,
		n.leased_until,
		n.acknowledged,
		n.failed
	FROM idempotency.partition AS a
	JOIN idempotency.subscription AS s ON s.subscription = a.subscription
	CROSS JOIN LATERAL (
		SELECT o.* FROM idempotency.position AS o
		WHERE o.subscription = a.subscription AND o.partition = a.partition
		ORDER BY o.version DESC LIMIT 1
	) AS n
	LEFT JOIN LATERAL (
		SELECT o.seq, o.published_at FROM idempotency.outbox AS o
		WHERE o.seq > greatest(n.skip, least(n.mark, n.range_from, n.reached, (SELECT min(f) FROM unnest(n.froms) AS f)))
			AND CASE
				WHEN o.bucket % a.modulus <> a.remainder OR NOT o.aggregatetype LIKE ANY (s.patterns) OR NOT pg_visible_in_snapshot(o.txid, a.stop) THEN false
				WHEN n.former_base IS NOT NULL AND o.seq <= n.mark
				THEN o.seq > n.reached AND (o.seq <= n.former_top AND pg_visible_in_snapshot(o.txid, n.former_base)) IS NOT TRUE
				ELSE NOT pg_visible_in_snapshot(o.txid, n.base)
					AND (n.upto IS NOT NULL AND pg_visible_in_snapshot(o.txid, n.upto) AND o.seq <= n.reached) IS NOT TRUE
			END
		ORDER BY o.seq LIMIT 1
	) AS unread ON true
	LEFT JOIN LATERAL (
		SELECT min(o.published_at) AS published_at FROM idempotency.outbox AS o WHERE o.seq = ANY (n.events)
	) AS listed ON true
	CROSS JOIN (SELECT max(o.seq) AS seq FROM idempotency.outbox AS o) AS last;
COMMENT ON VIEW idempotency.partitions IS 'the progress of each partition of a subscription, and its batch';
COMMENT ON COLUMN idempotency.partitions.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.partitions.partition IS 'the partition, from 0 on';
COMMENT ON COLUMN idempotency.partitions.partitions IS 'number of partitions';
COMMENT ON COLUMN idempotency.partitions.state IS 'delivering, paused, ending after a change of the number of partitions, or waiting for those that end';
COMMENT ON COLUMN idempotency.partitions.lag IS 'age of the oldest event that was not acknowledged, without parked events, in full seconds; NULL: none';
COMMENT ON COLUMN idempotency.partitions.lag_events IS 'numbers from the oldest event that was not delivered to the newest one, and events that were not acknowledged: an upper bound';
COMMENT ON COLUMN idempotency.partitions.batch_events IS 'number of events in the batch';
COMMENT ON COLUMN idempotency.partitions.attempt IS 'number of deliveries of the batch; NULL: none is out';
COMMENT ON COLUMN idempotency.partitions.holder IS 'process id of the session that fetched the batch';
COMMENT ON COLUMN idempotency.partitions.leased_at IS 'when the batch was leased; NULL: none is out';
COMMENT ON COLUMN idempotency.partitions.leased_until IS 'when the lease ends';
COMMENT ON COLUMN idempotency.partitions.acknowledged IS 'number of events acknowledged';
COMMENT ON COLUMN idempotency.partitions.failed IS 'number of deliveries of an event that failed, also those that were retried';

CREATE VIEW idempotency.subscriptions AS
	SELECT
		s.subscription,
		(SELECT max(a.lag) FROM idempotency.partitions AS a WHERE a.subscription = s.subscription) AS lag,
		k.scheduled,
		k.waiting,
		k.dead,
		CASE
			WHEN coalesce(p.problem, k.last_error) IS NULL OR has_table_privilege('idempotency.dead_letters', 'SELECT')
			THEN coalesce(p.problem, k.last_error)
			ELSE '<insufficient privilege>'
		END AS last_error,
		k.last_error_at,
		k.oldest_parked_at,
		s.owner,
		s.topics,
		s.handler,
		(SELECT a.modulus FROM idempotency.partition AS a WHERE a.subscription = s.subscription AND a.stop IS NULL LIMIT 1) AS partitions,
		s.max_attempts,
		s.retry_delay,
		s.max_retry_delay,
		s.max_lag,
		s.dead_letter_retention,
		s.paused_at,
		s.created_at
	FROM idempotency.subscription AS s
	LEFT JOIN LATERAL (
		SELECT
			count(e.retry_at) AS scheduled,
			count(*) FILTER (WHERE e.retry_at IS NULL AND e.dead_at IS NULL) AS waiting,
			count(e.dead_at) AS dead,
			(array_agg(e.error ORDER BY e.last_failed_at DESC) FILTER (WHERE e.last_failed_at IS NOT NULL))[1] AS last_error,
			max(e.last_failed_at) AS last_error_at,
			min(e.first_failed_at) FILTER (WHERE e.dead_at IS NULL) AS oldest_parked_at
		FROM idempotency.parked AS e
		WHERE e.subscription = s.subscription
	) AS k ON true
	CROSS JOIN LATERAL (SELECT idempotency_internal.relay_problem(s.subscription) AS problem) AS p
;
COMMENT ON VIEW idempotency.subscriptions IS 'the options of each subscription, and what delays it';
COMMENT ON COLUMN idempotency.subscriptions.subscription IS 'the name of the subscription';
COMMENT ON COLUMN idempotency.subscriptions.lag IS 'the greatest lag of a partition';
COMMENT ON COLUMN idempotency.subscriptions.scheduled IS 'events that failed and are retried, or that are not due yet';
COMMENT ON COLUMN idempotency.subscriptions.waiting IS 'later events of the same aggregates, which are blocked';
COMMENT ON COLUMN idempotency.subscriptions.dead IS 'dead letters';
COMMENT ON COLUMN idempotency.subscriptions.last_error IS 'the last error of a parked event or dead letter; for roles that can read dead_letters';
COMMENT ON COLUMN idempotency.subscriptions.last_error_at IS 'when that error occurred';
COMMENT ON COLUMN idempotency.subscriptions.oldest_parked_at IS 'the earliest first failure of an event that will be retried';
COMMENT ON COLUMN idempotency.subscriptions.owner IS 'the role whose members can use the subscription';
COMMENT ON COLUMN idempotency.subscriptions.topics IS 'patterns of topics';
COMMENT ON COLUMN idempotency.subscriptions.handler IS 'the function that deliver() calls for the owner; NULL: none';
COMMENT ON COLUMN idempotency.subscriptions.partitions IS 'number of partitions';
COMMENT ON COLUMN idempotency.subscriptions.max_attempts IS 'number of failures after which an event becomes a dead letter';
COMMENT ON COLUMN idempotency.subscriptions.retry_delay IS 'delay of the first retry';
COMMENT ON COLUMN idempotency.subscriptions.max_retry_delay IS 'longest delay of a retry';
COMMENT ON COLUMN idempotency.subscriptions.max_lag IS 'age at which an undelivered event is dropped; NULL: never';
COMMENT ON COLUMN idempotency.subscriptions.dead_letter_retention IS 'age at which a dead letter is deleted; NULL: never';
COMMENT ON COLUMN idempotency.subscriptions.paused_at IS 'since when nothing is delivered; NULL: it is not paused';
COMMENT ON COLUMN idempotency.subscriptions.created_at IS 'when the subscription was created';


-- delivery/assemble: end

-- What no part has: the rows that a dump contains, and the planner support of functions
-- that write.
SELECT pg_catalog.pg_extension_config_dump('idempotency.configuration', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox_seq', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.subscription', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.partition', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.position', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.parked', '');

ALTER FUNCTION idempotency.subscribe COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.alter_subscription COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.unsubscribe COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.fetch COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.ack(text, bigint) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.ack(text, bigint, bigint[]) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.nack COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.extend COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.pause COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.resume COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.seek(text, timestamptz) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.seek(text, text) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.redrive(text) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.redrive(text, uuid) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.discard(text) COST 10000 SUPPORT idempotency_internal.single_evaluation;
ALTER FUNCTION idempotency.discard(text, uuid) COST 10000 SUPPORT idempotency_internal.single_evaluation;

-- ---------------------------------------------------------------------------
-- Counters: statistics of each database
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency_internal.stats(
	OUT datid oid, OUT claims bigint, OUT replays bigint, OUT in_progress bigint,
	OUT mismatches bigint, OUT takeovers bigint, OUT completions bigint,
	OUT failures bigint, OUT releases bigint, OUT stale_tokens bigint,
	OUT refused_commits bigint, OUT reaped bigint, OUT zombies_reaped bigint,
	OUT waits bigint, OUT wait_time interval, OUT published bigint,
	OUT delivered bigint, OUT acknowledged bigint, OUT failed bigint,
	OUT batches_expired bigint, OUT dead_letters bigint, OUT redriven bigint,
	OUT events_reaped bigint, OUT events_dropped bigint,
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
		s.refused_commits,
		s.reaped,
		s.zombies_reaped,
		s.waits,
		s.wait_time,
		s.published,
		s.delivered,
		s.acknowledged,
		s.failed,
		s.batches_expired,
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
COMMENT ON COLUMN idempotency.stats.refused_commits IS 'transactions refused because of a claim that is not completed (IK428)';
COMMENT ON COLUMN idempotency.stats.reaped IS 'expired rows that the reaper deleted, including zombies';
COMMENT ON COLUMN idempotency.stats.zombies_reaped IS 'abandoned leases among them';
COMMENT ON COLUMN idempotency.stats.waits IS 'waits for the owner of a key';
COMMENT ON COLUMN idempotency.stats.wait_time IS 'time spent in these waits';
COMMENT ON COLUMN idempotency.stats.published IS 'events published';
COMMENT ON COLUMN idempotency.stats.delivered IS 'deliveries of events to consumers and handlers, including redeliveries';
COMMENT ON COLUMN idempotency.stats.acknowledged IS 'events acknowledged';
COMMENT ON COLUMN idempotency.stats.failed IS 'deliveries of an event that failed, by nack() or the end of the lease';
COMMENT ON COLUMN idempotency.stats.batches_expired IS 'batches delivered again because their lease or their worker had ended';
COMMENT ON COLUMN idempotency.stats.dead_letters IS 'events that became dead letters';
COMMENT ON COLUMN idempotency.stats.redriven IS 'failed events that redrive() returned to delivery';
COMMENT ON COLUMN idempotency.stats.events_reaped IS 'events that the reaper deleted from the outbox';
COMMENT ON COLUMN idempotency.stats.events_dropped IS 'numbers skipped because they were older than the max_lag of a subscription: an upper bound of the events';
COMMENT ON COLUMN idempotency.stats.stats_reset IS 'when the counters were last reset';

CREATE FUNCTION idempotency.stats_reset()
	RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_stats_reset';
COMMENT ON FUNCTION idempotency.stats_reset() IS
	'set the counters of this database to 0; returns stats.stats_reset';

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
	RETURNS boolean
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
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency_internal.grant_privileges(regrole, text[]) IS
	'grant privileges on objects of the extension to a role';

-- Four sets of privileges.  Clients claim, finish and publish.  Consumers deduplicate and
-- read events, including those of other roles.  Operators read keys and delete them.  Backups read all tables.
-- A cast of a constant through I/O functions needs EXECUTE on them.
CREATE FUNCTION idempotency.grant_client(role regrole)
	RETURNS boolean
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
			idempotency.problem_headers(idempotency.operation), idempotency.problem_headers(text), idempotency.setting')
$$;
COMMENT ON FUNCTION idempotency.grant_client(regrole) IS
	'let a role claim, complete and replay; true';

CREATE FUNCTION idempotency.grant_consumer(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'USAGE ON TYPE idempotency.identifier, idempotency.event',
		'EXECUTE ON ROUTINE
			idempotency.subscribe, idempotency.alter_subscription, idempotency.unsubscribe,
			idempotency.pause, idempotency.resume,
			idempotency.seek(text, timestamptz), idempotency.seek(text, text),
			idempotency.fetch, idempotency.has_more, idempotency.ack(text, bigint), idempotency.ack(text, bigint, bigint[]), idempotency.nack, idempotency.extend,
			idempotency.deliver, idempotency.handler_of, idempotency.end_event,
			idempotency.redrive(text), idempotency.redrive(text, uuid), idempotency.discard(text), idempotency.discard(text, uuid),
			idempotency.once, idempotency.once_many, idempotency.setting,
			idempotency_internal.identifier_in, idempotency_internal.identifier')
$$;
COMMENT ON FUNCTION idempotency.grant_consumer(regrole) IS
	'let a role subscribe to events and read them; true';

CREATE FUNCTION idempotency.grant_operator(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'USAGE ON TYPE idempotency.identifier, idempotency.document, idempotency.outcome,
			idempotency.operation, idempotency.holder',
		'SELECT ON idempotency.keys, idempotency.zombies, idempotency.stats, idempotency.reaper,
			idempotency.subscriptions, idempotency.partitions, idempotency.dead_letters, idempotency.settings',
		'EXECUTE ON FUNCTION
			idempotency_internal.identifier_in, idempotency_internal.identifier,
			idempotency_internal.keytext_in, idempotency_internal.keytext_out,
			idempotency_internal.keytext_lt, idempotency_internal.keytext_le,
			idempotency_internal.keytext_eq, idempotency_internal.keytext_ne,
			idempotency_internal.keytext_ge, idempotency_internal.keytext_gt,
			idempotency.peek, idempotency.forget, idempotency.reap,
			idempotency.holders(), idempotency.holders(idempotency.identifier, idempotency.identifier),
			idempotency.pause, idempotency.resume,
			idempotency.seek(text, timestamptz), idempotency.seek(text, text),
			idempotency.redrive(text), idempotency.redrive(text, uuid), idempotency.discard(text), idempotency.discard(text, uuid),
			idempotency_internal.stats(), idempotency_internal.relay_problem(text), idempotency.stats_reset, idempotency.setting')
$$;
COMMENT ON FUNCTION idempotency.grant_operator(regrole) IS
	'let a role read stored keys and delete them; true';

-- What pg_dump needs: it locks and copies each table, and reads each sequence.
CREATE FUNCTION idempotency.grant_backup(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'SELECT ON idempotency.key, idempotency.outbox, idempotency.subscription, idempotency.partition,
			idempotency.position, idempotency.parked, idempotency.reaper, idempotency.configuration',
		'SELECT ON SEQUENCE idempotency.token, idempotency.outbox_seq')
$$;
COMMENT ON FUNCTION idempotency.grant_backup(regrole) IS
	'let a role dump the database, with all keys, responses and events; true';

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

-- Monitoring roles see the counters, the progress of subscriptions and the sessions that hold
-- keys, but no keys, no events and no error texts.
GRANT USAGE ON SCHEMA idempotency TO pg_monitor;
GRANT SELECT ON idempotency.stats, idempotency.reaper, idempotency.subscriptions, idempotency.partitions TO pg_monitor;
GRANT EXECUTE ON FUNCTION idempotency_internal.stats(), idempotency_internal.relay_problem(text), idempotency.holders() TO pg_monitor;
