/* portable/idempotency.sql: the portable edition, version 1.0 */

-- The extension's functions for keys, leases and requests in SQL and PL/pgSQL, for servers
-- on which no C library can be loaded.  Any role that may CREATE in the database installs
-- it.  The script is one statement, without commands of psql, which leaves nothing set: psql, a
-- migration tool, a driver and a provider's console can all run it as it is, in a transaction or not:
--
--	psql --no-psqlrc --set=ON_ERROR_STOP=1 --file=portable/idempotency.sql
--
-- That role owns the functions and the table: clients call them with its rights, which is
-- why every function that is SECURITY DEFINER has a fixed search path, and takes no value of a
-- type of its caller's: see "JSON of other types than text".  README.md beside this file
-- lists what differs from the extension.
--
-- Some tools take a question mark, a colon before a word, or a dollar sign before a brace for a
-- parameter, also inside strings: write \x3F in an E'' string, and no colon before a word.

DO $installation$
DECLARE
	path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
	quoting CONSTANT pg_catalog.text := pg_catalog.current_setting('quote_all_identifiers');
	strings CONSTANT pg_catalog.text := pg_catalog.current_setting('standard_conforming_strings');
	detail pg_catalog.text;
	hint pg_catalog.text;
BEGIN
IF pg_catalog.to_regnamespace('idempotency') IS NOT NULL
	OR pg_catalog.to_regnamespace('idempotency_internal') IS NOT NULL THEN
	RAISE EXCEPTION USING
		ERRCODE = 'duplicate_object',
		MESSAGE = 'idempotency is installed already in this database',
		DETAIL = 'It is the portable edition or the extension: see pg_extension, and the schemas idempotency and idempotency_internal.',
		HINT = 'Run portable/uninstall.sql first, which also deletes all stored keys.';
ELSIF pg_catalog.current_setting('server_encoding') OPERATOR(pg_catalog.<>) 'UTF8' THEN
	RAISE EXCEPTION USING
		ERRCODE = 'feature_not_supported',
		MESSAGE = 'the portable edition requires a database in UTF8',
		HINT = 'Create the database with ENCODING ''UTF8''.';
END IF;
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
	pg_catalog.set_config('standard_conforming_strings', 'on', true),
	pg_catalog.set_config('quote_all_identifiers', 'off', true); -- definitions are made from others, see below
BEGIN
EXECUTE $idempotency$

CREATE SCHEMA idempotency;
COMMENT ON SCHEMA idempotency IS 'idempotency keys: retries have their effect exactly once';

-- What the functions in the other schema call.  No role but the owner has USAGE.
CREATE SCHEMA idempotency_internal;
COMMENT ON SCHEMA idempotency_internal IS 'idempotency, portable edition 1.0: internal functions';

-- ---------------------------------------------------------------------------
-- Types
-- ---------------------------------------------------------------------------

-- Domains, so that code that names the types of the extension runs unchanged.
CREATE DOMAIN idempotency.document AS json;
COMMENT ON DOMAIN idempotency.document IS 'a JSON argument: json, jsonb, text or an untyped literal';

CREATE DOMAIN idempotency.identifier AS text;
COMMENT ON DOMAIN idempotency.identifier IS 'a scope or a key';

CREATE DOMAIN idempotency.keytext AS text COLLATE "C";
COMMENT ON DOMAIN idempotency.keytext IS 'the stored form of a key';

-- An enum, not text: SELECT claim(...) INTO op assigns the text of the whole composite to
-- the first field.  That must fail; a text field would accept it as an outcome.
CREATE TYPE idempotency.outcome AS ENUM ('claimed', 'taken_over', 'replayed', 'in_progress', 'mismatched');
COMMENT ON TYPE idempotency.outcome IS 'the outcome of a claim';

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

-- The token is the first field for the same reason as the enum above.
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
-- The key store
-- ---------------------------------------------------------------------------

-- One row per key, with the columns of the extension and four more.  A claim without a
-- lease is a row, too: until it is completed, no other transaction sees it, and the unique
-- index makes others wait for it.  Its expires_at is -infinity, so that it could never be
-- replayed.  Where it takes over an abandoned operation, the columns of the lease stay as
-- they are until it is completed, so that release() restores them.
--
-- claim_retention is set if and only if such a claim is open, and no committed row has it.
-- claimed_in and proven_in tell whether the transaction that reads the row has claimed the
-- key, or shown its token; both follow savepoints because rows do.  They count only in a row
-- that this transaction has written: after the restore of a dump, a transaction can have the
-- number that a row brought from another server.  See is_written_here().
CREATE TABLE idempotency.key (
	created_at timestamptz NOT NULL,
	expires_at timestamptz NOT NULL,
	status smallint,
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	fingerprint bytea,
	response json,
	headers json,
	token bigint,
	attempt integer,
	leased_at timestamptz,
	leased_until timestamptz,
	recovery_point text,
	recovery_state json,
	request json,
	retention interval,
	finished_by bigint,
	claimed_in xid8,
	proven_in xid8,
	claim_fingerprint bytea,
	claim_retention interval,
	PRIMARY KEY (key, scope)
)
-- complete() updates the row that claim() has inserted.  The free space keeps the new
-- version on the same page (HOT); the next claims on the page reclaim the old one.
WITH (
	fillfactor = 85, autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = false,
	toast.autovacuum_vacuum_scale_factor = 0.1, toast.vacuum_truncate = false
);
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
COMMENT ON COLUMN idempotency.key.claimed_in IS 'the last transaction that claimed the key, or stored it by once()';
COMMENT ON COLUMN idempotency.key.proven_in IS 'the last transaction that showed the token of the lease';
COMMENT ON COLUMN idempotency.key.claim_fingerprint IS 'fingerprint of the request of an open claim without a lease';
COMMENT ON COLUMN idempotency.key.claim_retention IS 'retention of an open claim without a lease; NULL in every committed row';
COMMENT ON INDEX idempotency.key_pkey IS 'decides which claim succeeds';

CREATE INDEX key_abandoned ON idempotency.key (scope, token) WHERE token IS NOT NULL;
COMMENT ON INDEX idempotency.key_abandoned IS 'leases in progress, oldest token first';

-- The numbers of advisory locks come from a random number that only the owner can read: each
-- role can take advisory locks, and sees those of other sessions in pg_locks.  A sequence,
-- because pg_sequence_last_value() reads it without a query.  pg_dump dumps its value; without
-- one, which a dump of the schema alone restores, no claim gets a lock, and all are slower.
CREATE SEQUENCE idempotency_internal.secret MINVALUE -9223372036854775808;
COMMENT ON SEQUENCE idempotency_internal.secret IS 'its value makes the numbers of advisory locks unpredictable';
DO $$
BEGIN
	PERFORM setval('idempotency_internal.secret', ('x' || translate(right(gen_random_uuid()::text, 17), '-', ''))::bit(64)::bigint);
END
$$;

-- Where reap() continues in the table: see reap_keys().
CREATE SEQUENCE idempotency_internal.expiry_block MINVALUE 0;
COMMENT ON SEQUENCE idempotency_internal.expiry_block IS 'the block from which on keys expire next';
CREATE SEQUENCE idempotency_internal.scan_block MINVALUE 0;
COMMENT ON SEQUENCE idempotency_internal.scan_block IS 'the block at which the scan of the whole table continues';

-- Joined with a row of no columns, which costs nothing, a view cannot be updated: its rows are
-- changed by functions only, under the locks that these take.
CREATE VIEW idempotency.keys AS
	SELECT
		k.scope,
		k.key,
		CASE
			WHEN k.expires_at <= clock_timestamp() THEN 'expired'
			WHEN k.token IS NOT NULL AND k.leased_until = '-infinity' THEN 'released'
			WHEN k.token IS NOT NULL AND clock_timestamp() BETWEEN k.leased_at AND k.leased_until THEN 'in_progress'
			WHEN k.token IS NOT NULL THEN 'abandoned'
			WHEN k.status < 0 THEN 'failed'
			WHEN k.status IS NULL THEN 'seen'
			ELSE 'completed'
		END AS state,
		abs(k.status::integer) AS status,
		date_trunc('second', clock_timestamp() - k.created_at) AS age,
		CASE WHEN isfinite(k.expires_at) THEN date_trunc('second', k.expires_at - clock_timestamp()) END AS expires_in,
		pg_size_pretty(pg_column_size(k.response)::bigint) AS response_size,
		encode(k.fingerprint, 'hex') AS fingerprint,
		k.created_at,
		CASE WHEN isfinite(k.expires_at) THEN k.expires_at END AS expires_at
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
		date_trunc('second', now.now - k.created_at) AS age,
		date_trunc('second', now.now - k.leased_until) AS overdue,
		CASE WHEN isfinite(k.expires_at) THEN date_trunc('second', k.expires_at - now.now) END AS expires_in,
		k.leased_until
	FROM idempotency.key AS k, clock_timestamp() AS now (now)
	WHERE k.token IS NOT NULL
		AND k.leased_until <> '-infinity'
		AND now.now NOT BETWEEN k.leased_at AND k.leased_until
		AND k.expires_at > now.now;
COMMENT ON VIEW idempotency.zombies IS 'operations whose lease expired and that no other owner has taken over';
COMMENT ON COLUMN idempotency.zombies.scope IS 'the boundary inside which the key is unique';
COMMENT ON COLUMN idempotency.zombies.key IS 'the key';
COMMENT ON COLUMN idempotency.zombies.attempt IS 'number of owners that the operation has had';
COMMENT ON COLUMN idempotency.zombies.recovery_point IS 'the last checkpoint';
COMMENT ON COLUMN idempotency.zombies.age IS 'time since the operation was first claimed';
COMMENT ON COLUMN idempotency.zombies.overdue IS 'time since the lease expired; negative if the clock was set back';
COMMENT ON COLUMN idempotency.zombies.expires_in IS 'time until the key expires; NULL: never';
COMMENT ON COLUMN idempotency.zombies.leased_until IS 'when the lease expired';

-- ---------------------------------------------------------------------------
-- Errors that several functions raise
-- ---------------------------------------------------------------------------

-- delivery/assemble: copy
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
-- delivery/assemble: end of copy

CREATE FUNCTION idempotency_internal.detail(scope text, key text)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$SELECT format('Scope "%s", key "%s".', $1, $2)$$;
COMMENT ON FUNCTION idempotency_internal.detail(text, text) IS 'the detail that names scope and key';

-- One function for each error; its comment names the SQLSTATE.
CREATE FUNCTION idempotency_internal.raise_missing(what text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK400', format('idempotency %s is missing', $1), 'It is NULL or empty.',
		CASE WHEN $1 IN ('key', 'step') THEN 'Pass 1 to 255 characters, the same for every retry of one operation.' ELSE 'Pass 1 to 255 characters.' END)
$$;
COMMENT ON FUNCTION idempotency_internal.raise_missing(text) IS 'IK400: the scope, the key or the step is NULL or empty';

CREATE FUNCTION idempotency_internal.raise_too_long(what text, characters integer)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK400', format('idempotency %s is too long', $1),
		format('It has %s characters; at most 255 are allowed.', $2),
		'Derive a shorter one with idempotency.natural_key().')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_too_long(text, integer) IS 'IK400: the scope or the key is too long';

CREATE FUNCTION idempotency_internal.raise_in_progress(scope text, key text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK409', 'an operation with this idempotency key is in progress',
		idempotency_internal.detail($1, $2), 'Retry later with the same key.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_in_progress(text, text) IS 'IK409: another transaction holds the key';

CREATE FUNCTION idempotency_internal.raise_leased(scope text, key text, until timestamptz)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK409', 'an operation with this idempotency key is in progress',
		idempotency_internal.detail($1, $2),
		format('Retry later with the same key. Unless it is renewed, the lease of its owner ends in %s s.',
			greatest(ceil(extract(epoch FROM $3 - clock_timestamp())), 0)))
$$;
COMMENT ON FUNCTION idempotency_internal.raise_leased(text, text, timestamptz) IS 'IK409: another owner''s lease runs';

CREATE FUNCTION idempotency_internal.raise_claimed_here(scope text, key text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK409', 'this transaction has claimed this idempotency key already',
		idempotency_internal.detail($1, $2),
		'Complete, fail or release the claim first; a nested operation needs its own key, which idempotency.derive_key() returns.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_claimed_here(text, text) IS 'IK409: this transaction holds the key';

CREATE FUNCTION idempotency_internal.raise_lost(scope text, key text, token bigint)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK410', 'the lease on this idempotency key is lost',
		format('Scope "%s", key "%s", token %s.', $1, $2, $3),
		'Another owner took over, or the operation is finished or forgotten. Roll back, and begin the retry with idempotency.claim().')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_lost(text, text, bigint) IS 'IK410: the token is not that of the lease';

CREATE FUNCTION idempotency_internal.raise_no_claim(scope text, key text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK412', 'this transaction holds no claim on this idempotency key',
		idempotency_internal.detail($1, $2),
		CASE
			WHEN strpos(concat(current_setting('idempotency_internal.results', true), chr(30)), concat(chr(30), $1, chr(31), 'r', $2, chr(30))) > 0
				THEN 'idempotency.claim() replayed a stored answer: return it and write nothing.'
			ELSE 'Call idempotency.claim() in the same transaction first, or pass the token of the lease.'
		END)
$$;
COMMENT ON FUNCTION idempotency_internal.raise_no_claim(text, text) IS 'IK412: this transaction has no open claim on the key';

CREATE FUNCTION idempotency_internal.raise_no_lease(scope text, key text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK412', 'the claim on this idempotency key has no lease',
		idempotency_internal.detail($1, $2),
		'Claim with a lease, such as lease => ''30 seconds'', and pass its token.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_no_lease(text, text) IS 'IK412: the claim of this transaction has no lease';

CREATE FUNCTION idempotency_internal.raise_concurrent(scope text, key text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('40001', 'could not serialize access due to a concurrent idempotency key',
		idempotency_internal.detail($1, $2), 'Retry the transaction with the same key.')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_concurrent(text, text) IS '40001: another transaction changed the row of the key';

-- delivery/assemble: copy
CREATE FUNCTION idempotency_internal.raise_read_only(function text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('25006', format('cannot execute idempotency.%s() in a read-only transaction', $1), NULL, NULL)
$$;
COMMENT ON FUNCTION idempotency_internal.raise_read_only(text) IS '25006: the transaction cannot write';
-- delivery/assemble: end of copy

-- ---------------------------------------------------------------------------
-- Arguments and settings
-- ---------------------------------------------------------------------------

-- Scope and key can have any collation, which their parameters inherit: a comparison with the
-- table names its own, because two collations would be an error (42P22).

-- The helpers in SQL are not STRICT, and no less volatile than what they call: the server
-- inlines them, which costs a tenth of a call.

-- Settings are custom settings of the server, which accepts every value of them: they are
-- checked here, in the call that needs them.  What catches errors is PARALLEL UNSAFE, as are
-- its callers, because a parallel query cannot begin a subtransaction.

-- What configure() has stored.  It replaces these two functions by others that have the values in
-- their bodies, and that the server inlines: to read them costs a claim nothing, and each session
-- plans again after a change.
CREATE FUNCTION idempotency_internal.configured(name text, scope text)
	RETURNS text
	LANGUAGE sql STABLE PARALLEL SAFE
	RETURN NULL::text;
COMMENT ON FUNCTION idempotency_internal.configured(text, text) IS 'the stored value of a setting for a scope; NULL: none';

CREATE FUNCTION idempotency_internal.configured_retention(scope text)
	RETURNS interval
	LANGUAGE sql STABLE PARALLEL SAFE
	RETURN interval '24:00:00';
COMMENT ON FUNCTION idempotency_internal.configured_retention(text) IS 'the stored retention of a scope, or the default';

CREATE FUNCTION idempotency_internal.setting(name text, scope text DEFAULT '')
	RETURNS text
	LANGUAGE sql STABLE PARALLEL SAFE
AS $$SELECT coalesce(nullif(current_setting('idempotency.' || $1, true), ''), idempotency_internal.configured($1, $2), '')$$;
COMMENT ON FUNCTION idempotency_internal.setting(text, text) IS 'the value of a setting for a scope; empty: the default';

CREATE FUNCTION idempotency_internal.default_setting(name text)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
	RETURN CASE WHEN name IN ('retention', 'outbox_retention') THEN '1d' WHEN name = 'wait' THEN '5s'
		WHEN name IN ('max_response_size', 'max_payload_size') THEN '1MB' WHEN name = 'final_errors' THEN 'IKFIN' ELSE '' END;
COMMENT ON FUNCTION idempotency_internal.default_setting(text) IS 'the default of a setting';

-- delivery/assemble: copy
CREATE FUNCTION idempotency_internal.raise_setting(name text, value text, detail text, hint text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('22023', format('invalid value for parameter "idempotency.%s": "%s"', $1, $2), $3, $4)
$$;
COMMENT ON FUNCTION idempotency_internal.raise_setting(text, text, text, text) IS '22023: the value of a setting cannot be used';
-- delivery/assemble: end of copy

-- Tells in one expression, which PL/pgSQL evaluates without a query, whether names need no
-- error.  A control character is refused because it would garble the log; braces and
-- brackets, because many drivers send an array or an object as its text.
CREATE FUNCTION idempotency_internal.names_are_valid(scope text, key text)
	RETURNS boolean
	LANGUAGE sql STABLE PARALLEL SAFE
AS $$
	SELECT ($1 <> '' AND length($1) <= 255 AND $2 <> '' AND length($2) <= 255
		AND ($1 || $2) !~ E'[\\u0001-\\u001F\\u007F-\\u009F]' AND left($1, 1) NOT IN ('{', '[') AND left($2, 1) NOT IN ('{', '[')
		AND starts_with($1, idempotency_internal.setting('scope_prefix'))
		AND right(idempotency_internal.setting('scope_prefix'), 1) IN ('', '/', ':')) IS TRUE
$$;
COMMENT ON FUNCTION idempotency_internal.names_are_valid(text, text) IS 'whether scope and key can be used';

-- Tells whether a key is the text of an array, or another text whose first brace is closed
-- by its last character, such as the unexpanded template {{id}}.  A UUID in braces and the
-- JSON of an object with members are keys.
CREATE FUNCTION idempotency_internal.is_array(key text)
	RETURNS boolean
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
	depth integer := 0;
	ended boolean := false;
	brace text;
BEGIN
	-- without what stands in quotes or after a backslash; one array, because substr() counts
	-- the characters from the first
	FOREACH brace IN ARRAY string_to_array(regexp_replace(key, E'\\\\.|"([^"\\\\]|\\\\.)*("|$)', ' ', 'g'), NULL) LOOP
		IF ended THEN
			RETURN false;
		END IF;
		depth := depth + CASE brace WHEN '{' THEN 1 WHEN '}' THEN -1 ELSE 0 END;
		ended := brace = '}' AND depth = 0;
	END LOOP;
	RETURN ended
		AND key !~ '^{[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}}$'
		AND key !~ E'^{ *"([^"\\\\]|\\\\.)*" *:';
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_array(text) IS 'whether a key is the text of an array';

-- Drivers pass an object as its text, {} or JavaScript's [object Object]: it is the same for
-- each operation, and the first operation would answer for all of them.  A key can be no
-- array either: its elements would count as one message.
CREATE FUNCTION idempotency_internal.check_scalar(what text, value text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
BEGIN
	IF value = '{}' OR value ~ E'^\\[object .*\\]$' OR what = 'key' AND idempotency_internal.is_array(value) THEN
		PERFORM idempotency_internal.raise('IK400', format('idempotency %s is an array or an object', what),
			'Drivers pass an array or an object as its text.',
			CASE what WHEN 'key' THEN 'Pass the key as text, or pass an array to idempotency.once_many().'
				ELSE format('Pass the %s as text.', what) END);
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_scalar(text, text) IS 'raise IK400 for the text of an array or an object';

CREATE FUNCTION idempotency_internal.check_name(what text, name text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
BEGIN
	IF name IS NULL OR name = '' THEN
		PERFORM idempotency_internal.raise_missing(what);
	END IF;
	IF length(name) > 255 THEN
		PERFORM idempotency_internal.raise_too_long(what, length(name));
	END IF;
	PERFORM idempotency_internal.check_scalar(what, name);
	IF name ~ E'[\\u0001-\\u001F\\u007F-\\u009F]' THEN
		PERFORM idempotency_internal.raise('IK400', format('idempotency %s contains a control character', what),
			format('It is at character %s.', length(substring(name FROM E'^[^\\u0001-\\u001F\\u007F-\\u009F]*')) + 1),
			'Reject the client''s request.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_name(text, text) IS 'raise IK400 for a scope or key that cannot be used';

CREATE FUNCTION idempotency_internal.check_prefix(start text, scope text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	prefix text := idempotency_internal.setting('scope_prefix');
BEGIN
	IF right(prefix, 1) NOT IN ('', '/', ':') THEN
		PERFORM idempotency_internal.raise_setting('scope_prefix', prefix, 'A scope prefix must end in "/" or ":".',
			'Correct it with SET, or in the options of the connection.');
	ELSIF NOT starts_with(start, prefix) THEN
		PERFORM idempotency_internal.raise('42501', format('permission denied for idempotency scope "%s"', scope),
			format('Scopes of this role must begin with "%s".', prefix),
			'Pass a scope with this prefix, or change idempotency.scope_prefix with SET.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_prefix(text, text) IS 'raise 42501 unless start, which all scopes of a pattern have, begins with the prefix of the role';

CREATE FUNCTION idempotency_internal.check_scope(scope text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
BEGIN
	PERFORM idempotency_internal.check_name('scope', scope);
	PERFORM idempotency_internal.check_prefix(scope, scope);
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_scope(text) IS 'raise IK400 or 42501 for a scope that cannot be used';

-- Patterns of scopes: "*" matches any characters, and a backslash escapes the next one.
CREATE FUNCTION idempotency_internal.pattern_prefix(pattern text)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT regexp_replace(substring($1 FROM E'^(\x3F:\\\\.|[^\\\\*])*'), E'\\\\(.)', E'\\1', 'g')
$$;
COMMENT ON FUNCTION idempotency_internal.pattern_prefix(text) IS 'what each scope that a pattern matches begins with';

CREATE FUNCTION idempotency_internal.like_pattern(pattern text)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT coalesce(string_agg(CASE WHEN m.match[1] = '*' THEN '%' WHEN m.match[1] IN ('%', '_', E'\\') THEN E'\\' || m.match[1] ELSE m.match[1] END,
			'' ORDER BY m.position), '')
		FROM regexp_matches($1, E'\\\\\x3F.', 'g') WITH ORDINALITY AS m (match, position)
$$;
COMMENT ON FUNCTION idempotency_internal.like_pattern(text) IS 'a pattern of scopes as a pattern of LIKE';

CREATE FUNCTION idempotency_internal.check_pattern(pattern text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
BEGIN
	PERFORM idempotency_internal.check_name('scope', pattern);
	IF pattern !~ E'^(\x3F:\\\\.|[^\\\\])*$' THEN
		PERFORM idempotency_internal.raise('22023', 'pattern of scopes ends in a backslash', NULL,
			'A backslash escapes the next character; write two for one.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_pattern(text) IS 'raise IK400 or 22023 unless a pattern of scopes is valid';

CREATE FUNCTION idempotency_internal.check_names(scope text, key text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
BEGIN
	PERFORM idempotency_internal.check_scope(scope);
	PERFORM idempotency_internal.check_name('key', key);
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_names(text, text) IS 'raise IK400 or 42501 unless scope and key can be used';

-- delivery/assemble: copy
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
-- delivery/assemble: end of copy

-- The duration of a setting that a client, or configure(), sets: from the lowest to 2147483647
-- seconds, or -1.
CREATE FUNCTION idempotency_internal.retention_setting(name text, value text, lowest integer)
	RETURNS interval
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
DECLARE
	retention interval := idempotency_internal.duration(value, 's');
	seconds numeric := extract(epoch FROM retention);
BEGIN
	IF seconds = -1 OR seconds BETWEEN lowest AND 2147483647 THEN
		RETURN retention;
	END IF;
	PERFORM idempotency_internal.raise_setting(name, value,
		CASE WHEN retention IS NULL THEN 'It is not an interval.'
			ELSE format('It must be from %s to 2147483647 seconds, or -1 (forever).', lowest) END,
		'Use an interval such as ''30 days'' or ''90 minutes'', or a number of seconds.');
END
$$;
COMMENT ON FUNCTION idempotency_internal.retention_setting(text, text, integer) IS
	'the value of idempotency.retention or idempotency.outbox_retention';

CREATE FUNCTION idempotency_internal.default_retention(scope text)
	RETURNS interval
	LANGUAGE sql STABLE PARALLEL UNSAFE
AS $$
	SELECT CASE WHEN current_setting('idempotency.retention', true) <> ''
		THEN idempotency_internal.retention_setting('retention', current_setting('idempotency.retention', true), 1)
		ELSE idempotency_internal.configured_retention($1) END
$$;
COMMENT ON FUNCTION idempotency_internal.default_retention(text) IS 'idempotency.retention, for a scope';

-- delivery/assemble: copy
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
-- delivery/assemble: end of copy

-- -1 second is forever, as is infinity from PostgreSQL 17 on.
CREATE FUNCTION idempotency_internal.retention_end(retention interval, since timestamptz)
	RETURNS timestamptz
	LANGUAGE sql STABLE PARALLEL SAFE
	RETURN CASE WHEN retention = interval '-1 s' THEN timestamptz 'infinity' ELSE since + retention END;
COMMENT ON FUNCTION idempotency_internal.retention_end(interval, timestamptz) IS 'when an outcome expires';

CREATE FUNCTION idempotency_internal.check_retention(retention interval, scope text)
	RETURNS interval
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
DECLARE
	now timestamptz := clock_timestamp();
BEGIN
	IF retention IS NULL THEN
		RETURN idempotency_internal.default_retention(scope);
	ELSIF isfinite(retention) THEN
		PERFORM idempotency_internal.refuse_too_long('retention', retention, '100 years');
	END IF;
	IF idempotency_internal.retention_end(retention, now) <= now THEN
		PERFORM idempotency_internal.raise('22023', 'retention must be positive', NULL,
			'Pass ''-1 second'' to retain it forever, or NULL for the default.');
	END IF;
	RETURN retention;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_retention(interval, text) IS 'the retention of a call, or the default of a scope';

-- delivery/assemble: copy
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
-- delivery/assemble: end of copy

CREATE FUNCTION idempotency_internal.size_setting(name text, value text)
	RETURNS bigint
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
DECLARE
	bytes bigint;
BEGIN
	IF value = '' THEN
		RETURN 1048576;
	END IF;
	BEGIN
		-- the server knows B since version 16
		bytes := pg_size_bytes(regexp_replace(value, E'([0-9.])\\s*B\\s*$', E'\\1 bytes'));
	EXCEPTION
		WHEN data_exception THEN
			NULL;
	END;
	IF (bytes BETWEEN 1024 AND 536870911) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise_setting(name, value,
			'It must be a size from 1024 to 536870911 bytes.', 'Valid units for this parameter are "B", "kB", "MB", and "GB".');
	END IF;
	RETURN bytes;
END
$$;
COMMENT ON FUNCTION idempotency_internal.size_setting(text, text) IS
	'the value of idempotency.max_response_size or idempotency.max_payload_size';

CREATE FUNCTION idempotency_internal.max_response_size(scope text)
	RETURNS bigint
	LANGUAGE sql STABLE PARALLEL UNSAFE
AS $$SELECT idempotency_internal.size_setting('max_response_size', idempotency_internal.setting('max_response_size', $1))$$;
COMMENT ON FUNCTION idempotency_internal.max_response_size(text) IS 'idempotency.max_response_size, for a scope';

CREATE FUNCTION idempotency_internal.check_size(scope text, key text, what text, bytes bigint)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
DECLARE
	most bigint := idempotency_internal.max_response_size(scope);
BEGIN
	IF bytes > most THEN
		PERFORM idempotency_internal.raise('54000',
			format('%s of %s bytes exceeds idempotency.max_response_size (%s bytes)', what, bytes, most),
			idempotency_internal.detail(scope, key), 'Store a reference to the large part, or raise the limit with idempotency.configure().');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_size(text, text, text, bigint) IS 'raise 54000 for a document that is too large';

-- ---------------------------------------------------------------------------
-- Requests: canonical JSON (RFC 8785), fingerprints and derived keys
-- ---------------------------------------------------------------------------

-- The double nearest to a number, or NULL outside of their range.
CREATE FUNCTION idempotency_internal.nearest_double(number numeric)
	RETURNS double precision
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$SELECT CASE WHEN $1 BETWEEN 2.4703282292062328e-324 AND 1.7976931348623158e308 THEN $1::double precision END$$;
COMMENT ON FUNCTION idempotency_internal.nearest_double(numeric) IS 'the double nearest to a positive number';

-- Whether no decimal with fewer digits, and none nearer with as many, is the same double.
-- The decimals that read as one double are an interval, so of those with fewer digits only
-- the two neighbours with one digit less are compared.  extra_float_digits makes the
-- server's output the shortest.
CREATE FUNCTION idempotency_internal.is_shortest(number numeric, digits text, point integer)
	RETURNS boolean
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET extra_float_digits = 1
AS $$
DECLARE
	value double precision := idempotency_internal.nearest_double(number);
	exponent text := 'e' || point - length(digits) + 1;
	shortest text := value::text;
BEGIN
	IF length(digits) > 17 OR value IS NULL THEN
		RETURN false;
	ELSIF length(digits) <= 15 AND point BETWEEN -306 AND 308 THEN
		RETURN true;
	ELSIF length(digits) > 1 AND value IN (
			idempotency_internal.nearest_double((left(digits, -1) || exponent)::numeric),
			idempotency_internal.nearest_double((left(digits, -1)::bigint + 1 || exponent)::numeric)) THEN
		RETURN false;
	END IF;
	RETURN length(trim('0' FROM translate(split_part(shortest, 'e', 1), '.', ''))) > length(digits)
		OR shortest::numeric = number;
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_shortest(numeric, text, integer) IS
	'whether ECMAScript prints these digits for the double nearest to a positive number';

CREATE FUNCTION idempotency_internal.check_number(number numeric)
	RETURNS void
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF scale(number) > 399 OR abs(number) >= ('1e' || 400 - scale(number))::numeric THEN
		PERFORM idempotency_internal.raise('22003', 'a JSON number has more than 400 digits',
			'The zeros that an exponent stands for count, too.', 'Pass the number as a JSON string.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_number(numeric) IS 'raise 22003 for a number of more than 400 digits';

CREATE FUNCTION idempotency_internal.canonical_large_number(number numeric)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
AS $$
DECLARE
	sign text := CASE WHEN number < 0 THEN '-' ELSE '' END;
	plain text := trim_scale(abs(number))::text;
	whole text := ltrim(split_part(plain, '.', 1), '0');
	fraction text := split_part(plain, '.', 2);
	-- the number is 0.DIGITS times ten to the power of point
	digits text := rtrim(ltrim(whole || fraction, '0'), '0');
	point integer := CASE WHEN whole <> '' THEN length(whole) ELSE length(ltrim(fraction, '0')) - length(fraction) END;
BEGIN
	PERFORM idempotency_internal.check_number(number);
	IF point BETWEEN -5 AND 21 OR NOT idempotency_internal.is_shortest(abs(number), digits, point) THEN
		RETURN sign || plain;
	END IF;
	RETURN sign || left(digits, 1) || CASE WHEN length(digits) > 1 THEN '.' || substr(digits, 2) ELSE '' END
		|| CASE WHEN point > 0 THEN 'e+' ELSE 'e' END || point - 1;
END
$$;
COMMENT ON FUNCTION idempotency_internal.canonical_large_number(numeric) IS
	'the canonical text of a number, in plain notation or with an exponent';

CREATE FUNCTION idempotency_internal.canonical_number(number numeric)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT CASE
		WHEN $1 = 0 OR abs($1) >= 0.000001 AND abs($1) < 1e21 AND scale($1) <= 300 THEN trim_scale($1)::text
		ELSE idempotency_internal.canonical_large_number($1)
	END
$$;
COMMENT ON FUNCTION idempotency_internal.canonical_number(numeric) IS
	'the canonical text of a number: that of ECMAScript if it is exact, otherwise all digits';

-- Members are sorted by UTF-16 code units, in which the surrogates of U+10000 and above
-- precede U+E000 to U+FFFF.  In the order of code points, U+10FFFF in front of those puts
-- them last; U+10FFFF itself gets a successor that precedes them.
CREATE FUNCTION idempotency_internal.utf16_order(name text)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT CASE
		WHEN $1 ~ E'[\\uE000-\\U0010FFFF]' THEN
			regexp_replace(replace($1, chr(1114111), chr(1114111) || chr(1)), E'([\\uE000-\\uFFFF])', chr(1114111) || E'\\1', 'g')
		ELSE $1
	END
$$;
COMMENT ON FUNCTION idempotency_internal.utf16_order(text) IS
	'a text whose order by code points is the order of a name by UTF-16 code units';

-- jsonb prints numbers in plain notation: a request of a few bytes would take memory for all the
-- zeros that an exponent stands for.  The numbers that can have them are looked at before.
CREATE FUNCTION idempotency_internal.check_numbers(value jsonb)
	RETURNS void
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
	numbers CONSTANT pg_catalog.jsonpath := E'strict $.** \x3F (@ >= 1e100 || @ <= -1e100 || @ < 1e-100 && @ > -1e-100)';
BEGIN
	IF pg_catalog.jsonb_path_exists_opr(value, numbers) THEN
		PERFORM idempotency_internal.check_number(q.number::pg_catalog.numeric)
		FROM pg_catalog.jsonb_path_query(value, numbers) AS q (number);
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_numbers(jsonb) IS 'raise 22003 for a number that is longer printed than written';

-- The output of jsonb has the escapes of RFC 8785, and of members with one name it keeps
-- the last.  What differs is the order of members, white space, and numbers.
--
-- The tokens of the output are the scalars, the braces and brackets, and empty containers, each
-- with the name in front of it.  The place of a token in the canonical text is its place in the
-- output, and the distances by which sorting moves the members that it is part of: memory and
-- time are proportional to the text, at any depth.  U+0001 and U+0002, which jsonb never prints,
-- end tokens and names.
CREATE FUNCTION idempotency_internal.canonical_any(value jsonb)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	tokens text[];
	token text;
	name text;
	place integer := 0;
	lengths integer[];               -- of scalars and containers, in tokens
	depth integer := 1;
	opened integer[] := '{0}';       -- places of the containers around a token
	is_object boolean[] := '{false}';
	members integer[] := '{}';       -- their places, those of their objects, and their names
	objects integer[] := '{}';
	names text[] := '{}';
	member record;
	steps integer[];                 -- by which the distance changes at a place
	distance integer := 0;
	sorted text[];
BEGIN
	PERFORM idempotency_internal.check_numbers(value);
	tokens := string_to_array(rtrim(regexp_replace(value::text,
		E'((\x3F:"(\x3F:[^"\\\\]|\\\\.)*":)\x3F) \x3F("(\x3F:[^"\\\\]|\\\\.)*"|\\{\\}|\\[\\]|[][{}]|[^][{}, "]+)(\x3F:, )\x3F',
		E'\\1\x02\\2\x01', 'g'), E'\x01'), E'\x01');
	lengths := array_fill(1, ARRAY[cardinality(tokens)]);
	steps := array_fill(0, ARRAY[cardinality(tokens) + 1]);
	sorted := array_fill(''::text, ARRAY[cardinality(tokens)]);

	-- Find containers and members, and write each token
	FOREACH token IN ARRAY tokens LOOP
		place := place + 1;
		name := split_part(token, E'\x02', 1);
		token := split_part(token, E'\x02', 2);
		IF token IN ('}', ']') THEN
			lengths[opened[depth]] := place - opened[depth] + 1;
			depth := depth - 1;
		ELSIF is_object[depth] THEN
			members := members || place;
			objects := objects || opened[depth];
			names := names || CASE WHEN strpos(name, E'\\') = 0 THEN substr(name, 2, length(name) - 3) ELSE left(name, -1)::jsonb #>> '{}' END;
		ELSIF place > opened[depth] + 1 THEN
			name := ',';
		END IF;
		IF token IN ('{', '[') THEN
			depth := depth + 1;
			opened[depth] := place;
			is_object[depth] := token = '{';
		ELSIF token ~ E'^-\x3F[0-9]' AND (length(token) > 21 OR strpos(token, '.') > 0) THEN
			token := idempotency_internal.canonical_number(token::numeric);
		END IF;
		tokens[place] := name || token;
	END LOOP;

	-- Move each member to its place
	FOR member IN
		SELECT m.place, lengths[m.place] AS length, row_number() OVER sorted > 1 AS has_comma,
			(m.object + 1 - m.place + sum(lengths[m.place]) OVER sorted - lengths[m.place])::integer AS distance
		FROM unnest(members, objects, names) AS m (place, object, name)
		WINDOW sorted AS (PARTITION BY m.object ORDER BY idempotency_internal.utf16_order(m.name) COLLATE "C")
	LOOP
		IF member.has_comma THEN
			tokens[member.place] := ',' || tokens[member.place];
		END IF;
		steps[member.place] := steps[member.place] + member.distance;
		steps[member.place + member.length] := steps[member.place + member.length] - member.distance;
	END LOOP;
	FOR place IN 1 .. cardinality(tokens) LOOP
		distance := distance + steps[place];
		sorted[place + distance] := tokens[place];
	END LOOP;
	RETURN array_to_string(sorted, '');
END
$$;
COMMENT ON FUNCTION idempotency_internal.canonical_any(jsonb) IS 'the canonical text of a value, under any search path';

-- The same, and faster for a small object of scalars, whose canonical text is that of jsonb with
-- the members in another order, without the spaces between them, and without zeros at the end of
-- fractions.  Without a backslash, a quote is no part of a string; '": ' and ', "' stand between
-- strings only, unless one begins or ends so; and numbers of these sizes have no exponent.  A
-- tsvector has the order of bytes, which is that of UTF-16 below U+E000.  U+0001, which jsonb never
-- prints, ends the names there.  A query would cost more than all of this.  A value from a table
-- can be compressed: with an empty object added, it has its size in memory.
CREATE FUNCTION idempotency_internal.canonical(value jsonb)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
AS $$
DECLARE
	document pg_catalog.text;
	members pg_catalog.text[];
	member pg_catalog.text;
BEGIN
	IF pg_catalog.pg_column_size(value OPERATOR(pg_catalog.||) '{}') OPERATOR(pg_catalog.<=) 900
		AND NOT pg_catalog.jsonb_path_exists_opr(value, E'$.** \x3F (@ >= 1000000000000000000000 || @ <= -1000000000000000000000)') THEN
		document := value;
	END IF;
	IF pg_catalog.octet_length(document) OPERATOR(pg_catalog.<=) 400
		AND document OPERATOR(pg_catalog.~~) '{"%'
		AND document OPERATOR(pg_catalog.!~) E'[\\\\\\uE000-\\U0010FFFF]|.[[{]|[ {]"[:,}]'
		AND document OPERATOR(pg_catalog.!~~) '%0.000000%'
	THEN
		members := pg_catalog.string_to_array(
			pg_catalog.rtrim(pg_catalog.substr(pg_catalog.replace(document, '": ', E'\x01'), 3), '}'), ', "');
		FOREACH member IN ARRAY members LOOP
			IF member OPERATOR(pg_catalog.~~) E'%\x01%.%0' THEN
				members := pg_catalog.array_replace(members, member, pg_catalog.rtrim(pg_catalog.rtrim(member, '0'), '.'));
			END IF;
		END LOOP;
		RETURN '{"' OPERATOR(pg_catalog.||) pg_catalog.replace(
			pg_catalog.array_to_string(pg_catalog.tsvector_to_array(pg_catalog.array_to_tsvector(members)), ',"'), E'\x01', '":')
			OPERATOR(pg_catalog.||) '}';
	END IF;
	RETURN idempotency_internal.canonical_any(value);
END
$$;
COMMENT ON FUNCTION idempotency_internal.canonical(jsonb) IS 'the canonical text of a value, under any search path';

CREATE FUNCTION idempotency.canonical(document jsonb)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.canonical(document);
END
$$;
COMMENT ON FUNCTION idempotency.canonical(jsonb) IS
	'the canonical text of a JSON value (RFC 8785, but with exact numbers)';

CREATE FUNCTION idempotency_internal.fingerprint(document jsonb)
	RETURNS bytea
	LANGUAGE sql STABLE PARALLEL SAFE
	RETURN sha256(convert_to(idempotency_internal.canonical(document), 'UTF8'));
COMMENT ON FUNCTION idempotency_internal.fingerprint(jsonb) IS 'SHA-256 of the canonical text of a JSON value';

CREATE FUNCTION idempotency.fingerprint(document jsonb)
	RETURNS bytea
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.fingerprint(document);
END
$$;
COMMENT ON FUNCTION idempotency.fingerprint(jsonb) IS
	'SHA-256 of the canonical text of a JSON value, in UTF-8';

-- A label that names the purpose, and then the texts, each as its length in four bytes
-- (NULL is -1) and its bytes, so that no two lists have the same digest.
CREATE FUNCTION idempotency_internal.digest(label text, parts text[])
	RETURNS bytea
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT sha256(string_agg(coalesce(int4send(octet_length(p.part)) || convert_to(p.part, 'UTF8'), int4send(-1)), ''
		ORDER BY p.ordinality))
	FROM unnest($1 || $2) WITH ORDINALITY AS p (part)
$$;
COMMENT ON FUNCTION idempotency_internal.digest(text, text[]) IS 'SHA-256 of a label and a list of texts';

-- Not STRICT: a request may have no body.
CREATE FUNCTION idempotency.fingerprint(method text, path text, body jsonb)
	RETURNS bytea
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF method IS NULL OR path IS NULL THEN
		RETURN NULL;
	END IF;
	RETURN idempotency_internal.digest('idempotency request 1',
		ARRAY[method, path, idempotency_internal.canonical(body)]);
END
$$;
COMMENT ON FUNCTION idempotency.fingerprint(text, text, jsonb) IS
	'SHA-256 of a request: its method, its path and its canonical body';

CREATE FUNCTION idempotency.derive_key(scope text, key text, step text)
	RETURNS uuid
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	bytes bytea := substring(idempotency_internal.digest('idempotency derived key 1', ARRAY[scope, key, step]) FOR 16);
BEGIN
	IF scope = '' OR key = '' OR step = '' THEN
		PERFORM idempotency_internal.raise_missing(CASE '' WHEN scope THEN 'scope' WHEN key THEN 'key' ELSE 'step' END);
	END IF;
	IF left(scope, 1) IN ('{', '[') OR left(key, 1) IN ('{', '[') OR left(step, 1) IN ('{', '[') THEN
		PERFORM idempotency_internal.check_scalar('scope', scope);
		PERFORM idempotency_internal.check_scalar('key', key);
		PERFORM idempotency_internal.check_scalar('step', step);
	END IF;
	-- version 8, and the variant of RFC 9562
	bytes := set_byte(bytes, 6, get_byte(bytes, 6) & 15 | 128);
	bytes := set_byte(bytes, 8, get_byte(bytes, 8) & 63 | 128);
	RETURN encode(bytes, 'hex')::uuid;
END
$$;
COMMENT ON FUNCTION idempotency.derive_key(text, text, text) IS
	'the key of one step of an operation, to send to another service';

-- Not STRICT, nor is parse_header: a missing argument is an error.
CREATE FUNCTION idempotency.natural_key(VARIADIC parts text[])
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF array_ndims(parts) > 1 THEN
		PERFORM idempotency_internal.raise('22023', 'parts of a natural key have more than one dimension', NULL,
			'Pass an array of one dimension.');
	ELSIF coalesce(cardinality(parts), 0) = 0 THEN
		PERFORM idempotency_internal.raise('IK400', 'natural key has no parts', NULL,
			'Pass the values that identify the operation, each as an argument.');
	ELSIF array_position(parts, NULL) IS NOT NULL THEN
		PERFORM idempotency_internal.raise('IK400', 'part of a natural key is missing', NULL,
			'Pass a text that stands for a missing value, such as coalesce(value, '''').');
	END IF;
	PERFORM idempotency_internal.check_scalar('key part', part) FROM unnest(parts) AS part WHERE left(part, 1) IN ('{', '[');
	RETURN encode(idempotency_internal.digest('idempotency natural key 1', parts), 'hex');
END
$$;
COMMENT ON FUNCTION idempotency.natural_key(text[]) IS
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

-- 48 bits of milliseconds, 12 of their fraction, and 62 random ones.
CREATE FUNCTION idempotency.uuidv7()
	RETURNS uuid
	LANGUAGE plpgsql VOLATILE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	microseconds bigint := extract(epoch FROM clock_timestamp()) * 1000000;
BEGIN
	RETURN overlay(overlay(gen_random_uuid()::text
		PLACING to_hex(7 << 12 | ((microseconds % 1000 << 12) / 1000)::integer) FROM 15 FOR 4)
		PLACING regexp_replace(lpad(to_hex(microseconds / 1000), 12, '0'), '^.{8}', E'\\&-') FROM 1 FOR 13)::uuid;
END
$$;
COMMENT ON FUNCTION idempotency.uuidv7() IS
	'a new UUID of version 7, in the order of the clock';

-- ---------------------------------------------------------------------------
-- HTTP: the Idempotency-Key header, and problem details (RFC 9457)
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency_internal.raise_header(at integer, what text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK400', 'malformed Idempotency-Key header', format('At character %s: %s.', $1, $2),
		'The value is an RFC 8941 string in double quotes, such as "8e03978e-40d5-43dd-bc93-6894a57f9324".')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_header(integer, text) IS 'IK400: the header is malformed';

-- What RFC 8941 does not allow is refused and never repaired: two servers that repair a
-- key in different ways would run an operation twice.
CREATE FUNCTION idempotency.parse_header(value text)
	RETURNS text
	LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	string text := substring(value FROM E'^ *("(\x3F:[ !#-\\[\\]-~]|\\\\["\\\\])*)');
	parameters CONSTANT text := E'^(\x3F:; *[a-z*][a-z0-9_.*-]*(\x3F:=(\x3F:'
		|| E'-\x3F(\x3F:[0-9]{1,15}|[0-9]{1,12}[.][0-9]{1,3})'
		|| E'|"(\x3F:[ !#-\\[\\]-~]|\\\\["\\\\])*"'
		|| E'|[A-Za-z*][A-Za-z0-9!#$%&''*+.^_`|~:/-]*'
		|| E'|:(\x3F:[A-Za-z0-9+/]{4})*(\x3F:[A-Za-z0-9+/]{2}(\x3F:==)\x3F|[A-Za-z0-9+/]{3}=\x3F)\x3F:'
		|| E'|[\x3F][01]))\x3F)*';
	at integer;
	rest text;
	key text;
BEGIN
	at := length(value) - length(ltrim(value, ' ')) + 1;
	IF coalesce(ltrim(value, ' '), '') = '' THEN
		PERFORM idempotency_internal.raise_missing('key');
	ELSIF string IS NULL THEN
		PERFORM idempotency_internal.raise_header(at, 'the value is not a string in double quotes');
	END IF;

	-- the character after the valid ones must be the closing quote
	at := at + length(string);
	rest := substr(value, at);
	IF rest = '' THEN
		PERFORM idempotency_internal.raise_header(at, 'the string has no closing quote');
	ELSIF left(rest, 1) = E'\\' THEN
		PERFORM idempotency_internal.raise_header(at + 1, 'only a quote or a backslash can follow a backslash');
	ELSIF left(rest, 1) ~ E'[\\u0080-\\U0010FFFF]' THEN
		PERFORM idempotency_internal.raise_header(at, 'a string cannot contain a character outside ASCII');
	ELSIF left(rest, 1) <> '"' THEN
		PERFORM idempotency_internal.raise_header(at, 'a string cannot contain a control character');
	END IF;

	at := at + 1 + length(coalesce(substring(substr(rest, 2) FROM parameters), ''));
	at := at + length(substr(value, at)) - length(ltrim(substr(value, at), ' '));
	IF substr(value, at, 1) = ',' THEN
		PERFORM idempotency_internal.raise_header(at, 'the value is a list instead of one string');
	ELSIF substr(value, at, 1) <> '' THEN
		PERFORM idempotency_internal.raise_header(at, 'only valid parameters can follow the string');
	END IF;

	key := regexp_replace(substr(string, 2), E'\\\\(.)', E'\\1', 'g');
	IF key = '' THEN
		PERFORM idempotency_internal.raise_missing('key');
	ELSIF length(key) > 255 THEN
		PERFORM idempotency_internal.raise_too_long('key', length(key));
	END IF;
	RETURN key;
END
$$;
COMMENT ON FUNCTION idempotency.parse_header(text) IS
	'the key in the value of an Idempotency-Key header (an RFC 8941 string)';

-- The link to the documentation, or an empty text: no other value can end a header.
CREATE FUNCTION idempotency_internal.uri_reference(uri text)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT CASE
		WHEN octet_length($1) <= 2000
			AND $1 ~ E'^([A-Za-z][A-Za-z0-9+.-]*:|[^:]*$|[^:]*[/\x3F#])'
			AND $1 ~ E'^([]A-Za-z0-9._~:/\x3F@!$&''()*+,;=[-]|%[0-9A-Fa-f]{2})*(#([]A-Za-z0-9._~:/\x3F@!$&''()*+,;=[-]|%[0-9A-Fa-f]{2})*)\x3F$'
			THEN $1
		ELSE ''
	END
$$;
COMMENT ON FUNCTION idempotency_internal.uri_reference(text) IS 'a text if it is a URI reference, otherwise empty';

CREATE FUNCTION idempotency_internal.documentation()
	RETURNS text
	LANGUAGE sql STABLE PARALLEL SAFE
AS $$SELECT idempotency_internal.uri_reference(idempotency_internal.setting('documentation'))$$;
COMMENT ON FUNCTION idempotency_internal.documentation() IS 'idempotency.documentation, if it is a URI reference';

CREATE FUNCTION idempotency_internal.problem_text(type text, title text, status integer, detail text)
	RETURNS json
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT (format('{"type":%s,"title":%s,"status":%s', to_json($1), to_json($2), $3)
		|| coalesce(',"detail":' || to_json($4)::text, '') || '}')::json
$$;
COMMENT ON FUNCTION idempotency_internal.problem_text(text, text, integer, text) IS 'problem details as JSON';

CREATE FUNCTION idempotency.problem(sqlstate text)
	RETURNS json
	LANGUAGE plpgsql STABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	link text := idempotency_internal.documentation();
	status integer;
	phrase text;
	title text;
	detail text;
BEGIN
	CASE sqlstate
		WHEN 'IK400' THEN
			status := 400;
			phrase := 'Bad Request';
			title := 'Idempotency-Key is missing or malformed';
			detail := 'This operation requires an idempotency key of 1 to 255 characters; the header has it in double quotes, such as Idempotency-Key: "8e03978e-40d5-43dd-bc93-6894a57f9324".';
		WHEN 'IK409' THEN
			status := 409;
			phrase := 'Conflict';
			title := 'A request is outstanding for this Idempotency-Key';
			detail := 'An operation with this idempotency key is in progress. Retry later with the same key.';
		WHEN 'IK422' THEN
			status := 422;
			phrase := 'Unprocessable Content';
			title := 'Idempotency-Key is already used';
			detail := 'This idempotency key was used with another request. A new request needs a new key.';
		ELSE
			RETURN NULL;
	END CASE;
	IF link = '' THEN
		RETURN idempotency_internal.problem_text('about:blank', phrase, status, detail);
	END IF;
	RETURN idempotency_internal.problem_text(link, title, status, detail);
END
$$;
COMMENT ON FUNCTION idempotency.problem(text) IS
	'problem details (RFC 9457) for IK400, IK409 and IK422; NULL for other errors';

CREATE FUNCTION idempotency_internal.problem_of(operation idempotency.operation)
	RETURNS text
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$SELECT CASE ($1).outcome WHEN 'in_progress' THEN 'IK409' WHEN 'mismatched' THEN 'IK422' END$$;
COMMENT ON FUNCTION idempotency_internal.problem_of(idempotency.operation) IS 'the SQLSTATE that claim() has for an outcome';

CREATE FUNCTION idempotency.problem(operation idempotency.operation)
	RETURNS json
	LANGUAGE plpgsql STABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency.problem(idempotency_internal.problem_of(operation));
END
$$;
COMMENT ON FUNCTION idempotency.problem(idempotency.operation) IS
	'problem details (RFC 9457) for in_progress and mismatched; NULL for other outcomes';

CREATE FUNCTION idempotency_internal.problem_headers(sqlstate text, retry_after integer)
	RETURNS json
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	link text := idempotency_internal.documentation();
BEGIN
	IF idempotency.problem(sqlstate) IS NULL THEN
		RETURN NULL;
	END IF;
	RETURN '{"Content-Type":"application/problem+json"'
		|| CASE WHEN link <> '' THEN ',"Link":' || to_json(format('<%s>; rel="describedby"', link))::text ELSE '' END
		|| CASE WHEN sqlstate = 'IK409' THEN format(',"Retry-After":"%s"', greatest(retry_after, 1)) ELSE '' END
		|| '}';
END
$$;
COMMENT ON FUNCTION idempotency_internal.problem_headers(text, integer) IS 'the headers of a response with problem details';

CREATE FUNCTION idempotency.problem_headers(operation idempotency.operation)
	RETURNS json
	LANGUAGE plpgsql STABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.problem_headers(idempotency_internal.problem_of(operation), operation.retry_after);
END
$$;
COMMENT ON FUNCTION idempotency.problem_headers(idempotency.operation) IS
	'the headers of an HTTP response with problem(operation)';

CREATE FUNCTION idempotency.problem_headers(sqlstate text)
	RETURNS json
	LANGUAGE plpgsql STABLE PARALLEL SAFE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.problem_headers(sqlstate, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.problem_headers(text) IS
	'the headers of an HTTP response with problem(sqlstate)';

-- ---------------------------------------------------------------------------
-- The result of the last call about each scope, for require_claim() and current_key()
-- ---------------------------------------------------------------------------

-- A setting of the transaction, which follows savepoints: the last result first, each as
-- U+001E, the scope, U+001F, a mark, and the key; neither name contains these characters.
-- The mark is k for a granted claim, b for a batch of once_many(), r for a replay, and n for
-- none of them.  Any role can change the setting, but only a key that the transaction has
-- claimed counts.

CREATE FUNCTION idempotency_internal.results()
	RETURNS text
	LANGUAGE sql STABLE PARALLEL SAFE
AS $$SELECT coalesce(current_setting('idempotency_internal.results', true), '')$$;
COMMENT ON FUNCTION idempotency_internal.results() IS 'the results of this transaction';

CREATE FUNCTION idempotency_internal.results_without(scope text)
	RETURNS text
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	results text := idempotency_internal.results();
	start integer := strpos(results, chr(30) || scope || chr(31));
	rest text;
BEGIN
	IF start = 0 THEN
		RETURN results;
	END IF;
	rest := substr(results, start + 1);
	RETURN left(results, start - 1) || CASE WHEN strpos(rest, chr(30)) > 0 THEN substr(rest, strpos(rest, chr(30))) ELSE '' END;
END
$$;
COMMENT ON FUNCTION idempotency_internal.results_without(text) IS 'the results of this transaction in other scopes';

CREATE FUNCTION idempotency_internal.set_result(scope text, mark text, key text)
	RETURNS text
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT set_config('idempotency_internal.results', chr(30) || $1 || chr(31) || $2 || $3 || CASE
		WHEN idempotency_internal.results() = '' THEN ''
		ELSE idempotency_internal.results_without($1)
	END, true)
$$;
COMMENT ON FUNCTION idempotency_internal.set_result(text, text, text) IS 'set the result of the last call about a scope';

-- The writer is the xmin of a row that the transaction can see, and that claims to be its own.
-- A subtransaction has a greater number than its transaction.  A frozen row keeps its xmin,
-- which seems to be greater after 2^31 transactions: then pg_xact_status() returns another
-- status, or raises 22023 for a transaction that does not exist yet.  age() counts from a
-- number that the transaction fixes at its first use, perhaps before it had its own; the
-- difference of two ages does not depend on it.
CREATE FUNCTION idempotency_internal.is_written_here(writer xid)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN CASE
		WHEN writer = pg_current_xact_id_if_assigned()::xid THEN true
		WHEN age(writer) < age(pg_current_xact_id_if_assigned()::xid) THEN
			pg_xact_status((pg_current_xact_id_if_assigned()::text::bigint
				+ age(pg_current_xact_id_if_assigned()::xid) - age(writer))::text::xid8) = 'in progress'
		ELSE false
	END;
COMMENT ON FUNCTION idempotency_internal.is_written_here(xid) IS
	'whether this transaction, or a subtransaction of it, has written a row that it can see';

CREATE FUNCTION idempotency_internal.is_granted(scope text, mark text, key text)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT $2 IN ('k', 'b') AND EXISTS (
		SELECT FROM idempotency.key AS k
		WHERE k.scope = $1 COLLATE "C" AND k.key = $3 COLLATE "C"
			AND pg_current_xact_id_if_assigned() IN (k.claimed_in, k.proven_in) AND idempotency_internal.is_written_here(k.xmin))
$$;
COMMENT ON FUNCTION idempotency_internal.is_granted(text, text, text) IS
	'whether this transaction has claimed the key of a result';

-- ---------------------------------------------------------------------------
-- Calls about a lease: one that fails, or is rolled back, prevents the commit
-- ---------------------------------------------------------------------------

-- A rollback to a savepoint undoes all that SQL can write, except the value of a sequence that
-- a session has set: currval() tells each session its own.  So each call notes itself there and
-- in a setting of the transaction.  The two are equal unless the last call failed, or was rolled
-- back; then only a call with the same token makes them equal again.  (setval() does not change
-- lastval(), which belongs to the client.)
--
-- A note is the number of the call in the transaction, and 32 bits of a hash of its token; they
-- are 0 once calls with different tokens have failed, and from then on nothing lifts that.
-- A row that the transaction wrote for a lease has the setting beside it: without one, somebody
-- has reset it (RESET ALL), and what it told is unknown.
CREATE SEQUENCE idempotency_internal.call;
COMMENT ON SEQUENCE idempotency_internal.call IS 'the last call about a lease, which currval() tells each session';

CREATE FUNCTION idempotency_internal.token_note(token bigint)
	RETURNS bigint
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$SELECT (hashint8($1)::bigint & 2147483647) + 1$$;
COMMENT ON FUNCTION idempotency_internal.token_note(bigint) IS 'the part of a note that tells tokens apart';

CREATE FUNCTION idempotency_internal.note_call(token bigint, is_grant boolean DEFAULT false)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	succeeded bigint := nullif(current_setting('idempotency_internal.call', true), '');
	last bigint := CASE WHEN succeeded IS NULL THEN 0 ELSE currval('idempotency_internal.call') END;
	note bigint := coalesce(idempotency_internal.token_note(token), 0);
BEGIN
	-- The claim that granted the token is no call with it: its rollback leaves nothing to prove.
	IF is_grant AND succeeded IS NOT NULL THEN
		RETURN;
	ELSIF succeeded <> last AND last & 4294967295 <> note THEN
		note := 0;
	END IF;
	-- Lock the table before the sequence, as uninstall.sql does
	PERFORM FROM idempotency.key LIMIT 0;
	last := setval('idempotency_internal.call', (((last >> 32) + 1) << 32) + note);
	IF note <> 0 THEN
		PERFORM set_config('idempotency_internal.call', last::text, true);
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.note_call(bigint, boolean) IS
	'note that a call about the lease of a token begins; an error, or a rollback, takes half of the note back';

CREATE FUNCTION idempotency_internal.is_unproven()
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	-- currval() is an error before the first call of a session
	RETURN coalesce(current_setting('idempotency_internal.call', true), '') <> ''
		AND current_setting('idempotency_internal.call')::bigint <> currval('idempotency_internal.call');
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_unproven() IS 'whether the last call about a lease failed, or was rolled back';

CREATE FUNCTION idempotency_internal.raise_unproven(detail text)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT idempotency_internal.raise('IK410', 'cannot commit without proof that the lease is current', $1,
		'A call with this token failed and was caught, or was rolled back. Call '
		'idempotency.complete(), fail(), release(), renew() or checkpoint() with the '
		'token again, or roll back and begin the retry with idempotency.claim().')
$$;
COMMENT ON FUNCTION idempotency_internal.raise_unproven(text) IS 'IK410, at commit: the last call about a lease failed';

CREATE FUNCTION idempotency_internal.require_proof()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	token bigint := coalesce(new.token, new.finished_by);
BEGIN
	IF idempotency_internal.is_unproven()
		OR token IS NOT NULL AND pg_current_xact_id() IN (new.claimed_in, new.proven_in)
		AND coalesce(current_setting('idempotency_internal.call', true), '') = ''
	THEN
		PERFORM idempotency_internal.raise_unproven(CASE idempotency_internal.token_note(token)
			WHEN currval('idempotency_internal.call') & 4294967295 THEN
				format('Scope "%s", key "%s", token %s.', new.scope, new.key, token)
		END);
	END IF;
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.require_proof() IS
	'trigger: refuse to commit after a call about a lease that failed, or was rolled back';

-- Each claim, and each call with a token, queues an event; that of a call that fails is lost.
CREATE CONSTRAINT TRIGGER require_proof AFTER INSERT OR UPDATE OF token, proven_in ON idempotency.key
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	WHEN (new.claim_retention IS NULL AND (new.token IS NOT NULL OR new.proven_in IS NOT NULL))
	EXECUTE FUNCTION idempotency_internal.require_proof();
COMMENT ON TRIGGER require_proof ON idempotency.key IS 'the last call about a lease must have succeeded';

-- ---------------------------------------------------------------------------
-- Claims
-- ---------------------------------------------------------------------------

-- Writes a row of the table: a new one, or, if "seen" is a row's place, in place of the
-- version of "seen" and "writer".  Returns false, with nothing written, if another
-- transaction came first.  Waits for a transaction that is writing the row.
--
-- ON CONFLICT names no index, here and in record_many(): then it considers every unique index,
-- also those that REINDEX CONCURRENTLY is about to use, or to drop, in which a race would raise
-- 23505.  An index of somebody else's can also conflict, with the row of another key: callers
-- that repeat the insertion count to max_conflicts().
CREATE FUNCTION idempotency_internal.put(new idempotency.key, seen tid, writer xid)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	-- A takeover keeps what the former owner stored: the values of the row itself, so that
	-- large ones stay where they are.
	is_takeover boolean := new.token IS NOT NULL AND (new.attempt > 1 OR new.claim_retention IS NOT NULL);
BEGIN
	IF seen IS NULL THEN
		INSERT INTO idempotency.key (
			-- distributed: tenant,
			created_at, expires_at, scope, key, fingerprint, token, attempt, leased_at, leased_until,
			request, retention, claimed_in, claim_fingerprint, claim_retention)
		VALUES (
			-- distributed: home,
			new.created_at, new.expires_at, new.scope, new.key, new.fingerprint, new.token, new.attempt, new.leased_at,
			new.leased_until, new.request, new.retention, new.claimed_in, new.claim_fingerprint, new.claim_retention)
		ON CONFLICT DO NOTHING;
	ELSE
		UPDATE idempotency.key AS k SET
			created_at = new.created_at,
			expires_at = new.expires_at,
			status = new.status,
			fingerprint = new.fingerprint,
			response = new.response,
			headers = new.headers,
			token = new.token,
			attempt = new.attempt,
			leased_at = new.leased_at,
			leased_until = new.leased_until,
			recovery_point = new.recovery_point,
			recovery_state = CASE WHEN is_takeover THEN k.recovery_state ELSE new.recovery_state END,
			request = CASE WHEN is_takeover AND k.request IS NOT NULL THEN k.request ELSE new.request END,
			retention = new.retention,
			finished_by = new.finished_by,
			claimed_in = new.claimed_in,
			proven_in = new.proven_in,
			claim_fingerprint = new.claim_fingerprint,
			claim_retention = new.claim_retention
		WHERE k.scope = new.scope AND k.key = new.key AND k.ctid = seen AND k.xmin = writer;
	END IF;
	RETURN FOUND;
END
$$;
COMMENT ON FUNCTION idempotency_internal.put(idempotency.key, tid, xid) IS 'write a row, unless another transaction came first';

-- After so many conflicts without a row of the key, another index is the reason.
CREATE FUNCTION idempotency_internal.max_conflicts()
	RETURNS integer
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
	RETURN 100;
COMMENT ON FUNCTION idempotency_internal.max_conflicts() IS 'how often a call repeats an insertion';

-- The insertion makes the server name the index.
CREATE FUNCTION idempotency_internal.raise_conflict(scope text, key text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	INSERT INTO idempotency.key (
		-- distributed: tenant,
		created_at, expires_at, scope, key)
	VALUES (
		-- distributed: home,
		clock_timestamp(), '-infinity', scope, key);
	PERFORM idempotency_internal.raise_concurrent(scope, key);
END
$$;
COMMENT ON FUNCTION idempotency_internal.raise_conflict(text, text) IS
	'23505: a unique index that the edition has not created; or 40001';

-- The number of the advisory lock of a key; without a secret NULL.
CREATE FUNCTION idempotency_internal.lock_number(scope text, key text)
	RETURNS bigint
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN hashtextextended(encode(sha256(convert_to(
		pg_sequence_last_value('idempotency_internal.secret')::text || concat(E'\x1F', scope, E'\x1F', key), 'UTF8')), 'hex'), 0);
COMMENT ON FUNCTION idempotency_internal.lock_number(text, text) IS 'the number of the advisory lock of a key';

-- Tries the advisory lock of a new key, which tells other sessions that this one might be
-- inserting its row.  No call waits for the lock, and the index alone decides: the lock
-- chooses between a plain insertion, and one in a subtransaction whose wait is bounded.  A role
-- that has seen the number in pg_locks can hold the lock while a key is claimed, which makes the
-- claim slower, and release it afterwards: then the owner does not hold it, and the wait of the next
-- claim has no bound but the caller's lock_timeout.  A key without a secret is NULL: no lock.
CREATE FUNCTION idempotency_internal.announce(scope text, key text)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN pg_try_advisory_xact_lock(idempotency_internal.lock_number(scope, key));
COMMENT ON FUNCTION idempotency_internal.announce(text, text) IS
	'whether no other session has announced to insert the key; NULL if that is unknown';

-- delivery/assemble: copy
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
-- delivery/assemble: end of copy

-- The same as put(), but waits for at most wait_ms.  Returns NULL if that was too short.
-- Raises 40001 for a row that the transaction's snapshot does not show.
CREATE FUNCTION idempotency_internal.put_within(new idempotency.key, seen tid, writer xid, wait_ms bigint)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	bounded boolean;
	written boolean;
BEGIN
	-- a wait for the table is none for the owner of the key
	LOCK TABLE idempotency.key IN ROW EXCLUSIVE MODE; -- not distributed
	BEGIN
		bounded := idempotency_internal.bound_wait(wait_ms);
		IF wait_ms <= 0 AND seen IS NOT NULL THEN
			PERFORM FROM idempotency.key AS k WHERE k.scope = new.scope AND k.key = new.key FOR NO KEY UPDATE NOWAIT;
		END IF;
		written := idempotency_internal.put(new, seen, writer);
		PERFORM set_config('lock_timeout', lock_timeout, true); -- not distributed
		-- distributed: bounded := idempotency_internal.set_lock_timeout(lock_timeout);
	EXCEPTION
		WHEN lock_not_available THEN
			IF NOT bounded THEN
				RAISE;
			END IF;
			RETURN NULL;
		WHEN serialization_failure THEN
			PERFORM idempotency_internal.raise_concurrent(new.scope, new.key);
	END;
	-- the owner whose end was awaited has released the lock
	PERFORM idempotency_internal.announce(new.scope, new.key); -- not distributed
	RETURN written;
END
$$;
COMMENT ON FUNCTION idempotency_internal.put_within(idempotency.key, tid, xid, bigint) IS
	'write a row within a time, unless another transaction came first';

-- Tokens grow from owner to owner of a key, also where the key was deleted in between, and on every
-- node of a cluster.  Above 17 random bits, which no other client can compute, they have the time
-- since 2025 in units of 16.384 ms, so that a double holds them until 2060.  Within a unit, and if the
-- clock was set back, a token grows from the last one of its row; see also outlive().  After a
-- move from the extension, whose tokens do not depend on the clock, an offset keeps them growing.
CREATE SEQUENCE idempotency_internal.token_offset;
COMMENT ON SEQUENCE idempotency_internal.token_offset IS 'added to the time in tokens; from_extension.sql sets it';

CREATE FUNCTION idempotency_internal.token_time()
	RETURNS bigint
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN (extract(epoch FROM clock_timestamp() - timestamptz '2025-01-01 00:00:00+00') * 61.03515625)::bigint
		+ coalesce(pg_sequence_last_value('idempotency_internal.token_offset'), 0);
COMMENT ON FUNCTION idempotency_internal.token_time() IS 'the time in tokens';

CREATE FUNCTION idempotency_internal.new_token(last bigint)
	RETURNS bigint
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
AS $$
	SELECT greatest($1 + 1, idempotency_internal.token_time() << 17) + (('x' || right(gen_random_uuid()::text, 8))::bit(32)::bigint & 131071)
$$;
COMMENT ON FUNCTION idempotency_internal.new_token(bigint) IS 'a fencing token greater than the last one, which can be NULL';

-- Before a row is deleted: the next token of the key is greater than this one only in another unit.
CREATE FUNCTION idempotency_internal.outlive(token bigint)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	IF token >> 17 >= idempotency_internal.token_time() THEN
		PERFORM pg_sleep(0.017);
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.outlive(bigint) IS 'wait until the time in tokens is greater than that of a token, for one unit at most';

-- The row of a granted claim: without a lease, with one, or the finished record of once().
-- "stored" is the row of an abandoned operation, or NULL; "last" is the last token of a row that is
-- overwritten.  A row that is not final gets its token after a wait, which is greater than all before.
CREATE FUNCTION idempotency_internal.granted_row(
	stored idempotency.key, p_scope text, p_key text, request_fingerprint bytea, request json,
	lease interval, retention interval, for_once boolean, is_final boolean DEFAULT true, last bigint DEFAULT NULL)
	RETURNS idempotency.key
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	new idempotency.key := stored;
	now timestamptz := clock_timestamp();
BEGIN
	new.scope := p_scope;
	new.key := p_key;
	new.created_at := coalesce(new.created_at, now);
	new.claimed_in := pg_current_xact_id();
	new.proven_in := NULL;
	IF for_once THEN
		new := NULL;
		new.scope := p_scope;
		new.key := p_key;
		new.created_at := coalesce(stored.created_at, now);
		new.claimed_in := pg_current_xact_id();
		new.expires_at := idempotency_internal.retention_end(retention, now);
	ELSIF lease IS NULL THEN
		new.expires_at := coalesce(new.expires_at, '-infinity');
		new.claim_fingerprint := coalesce(new.fingerprint, request_fingerprint);
		-- distributed: IF stored.scope IS NULL THEN new.fingerprint := request_fingerprint; new.claim_fingerprint := NULL; END IF;
		new.claim_retention := retention;
	ELSE
		new.leased_at := now;
		new.leased_until := now + lease;
		new.expires_at := idempotency_internal.retention_end(retention, new.leased_until);
		new.retention := nullif(retention, interval '-1 s');
		new.token := greatest(new.token, last, 0);
		IF is_final THEN
			new.token := idempotency_internal.new_token(new.token);
		END IF;
		new.attempt := coalesce(new.attempt, 0) + 1;
		new.fingerprint := coalesce(new.fingerprint, request_fingerprint);
		new.request := coalesce(new.request, request);
	END IF;
	RETURN new;
END
$$;
COMMENT ON FUNCTION idempotency_internal.granted_row(idempotency.key, text, text, bytea, json, interval, interval, boolean, boolean, bigint) IS
	'the row that a granted claim writes';

-- Gives a row that was written after a wait its token, and times that begin now.
CREATE FUNCTION idempotency_internal.finish_waiting(
	written idempotency.key, lease interval, retention interval, for_once boolean)
	RETURNS idempotency.key
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	new idempotency.key := written;
	now timestamptz := clock_timestamp();
BEGIN
	IF for_once THEN
		new.expires_at := idempotency_internal.retention_end(retention, now);
	ELSIF lease IS NOT NULL THEN
		new.leased_at := now;
		new.leased_until := now + lease;
		new.expires_at := idempotency_internal.retention_end(retention, new.leased_until);
		new.token := idempotency_internal.new_token(new.token);
	ELSE
		RETURN new;
	END IF;
	UPDATE idempotency.key AS k SET
		expires_at = new.expires_at,
		token = new.token,
		leased_at = new.leased_at,
		leased_until = new.leased_until
	WHERE k.scope = new.scope AND k.key = new.key AND k.claimed_in = pg_current_xact_id() AND idempotency_internal.is_written_here(k.xmin);
	RETURN new;
END
$$;
COMMENT ON FUNCTION idempotency_internal.finish_waiting(idempotency.key, interval, interval, boolean) IS
	'complete a row that was written after a wait';

-- Tells whether the version of a row that the transaction's snapshot shows is the last that is
-- committed.  Another transaction can be changing it.  A lock finds out, and is released at
-- once, with a subtransaction, because the owner of the key must not wait for it.
CREATE FUNCTION idempotency_internal.is_unchanged(p_scope text, p_key text, seen tid)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	PERFORM FROM idempotency.key AS k
	WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C" AND k.ctid = seen
	FOR NO KEY UPDATE SKIP LOCKED;
	RAISE EXCEPTION USING ERRCODE = 'IK000';
EXCEPTION
	WHEN serialization_failure THEN
		RETURN false;
	WHEN SQLSTATE 'IK000' THEN
		RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_unchanged(text, text, tid) IS
	'whether no other transaction has changed or removed a row since the snapshot';

-- Reads the row of a key, for claim().  "seen" and "writer" are its version, or NULL; "state" is
-- that of the key: absent, expired, stored, mismatched, leased, abandoned, or here if this
-- transaction holds the key.
--
-- A fixed snapshot shows a row that another transaction has removed since, which counts as
-- absent: an insertion finds out.  Such a row stays visible beside the one that is inserted, so
-- queries that follow name what the latter has: an open claim, or its token.
CREATE FUNCTION idempotency_internal.read_key(
	p_scope text, p_key text, request_fingerprint bytea, is_last boolean, can_wait boolean,
	OUT stored idempotency.key, OUT seen tid, OUT writer xid, OUT state text, OUT now timestamptz)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	version record;
BEGIN
	SELECT k AS stored, k.ctid, k.xmin, k.xmax,
		CASE WHEN pg_current_xact_id_if_assigned() IN (k.claimed_in, k.proven_in) THEN idempotency_internal.is_written_here(k.xmin) END AS is_own
	INTO version
	FROM idempotency.key AS k
	WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C"
	ORDER BY is_own DESC NULLS LAST -- not distributed
	LIMIT 1;
	state := 'absent';
	IF NOT FOUND THEN
		RETURN;
	END IF;
	now := clock_timestamp();
	stored := version.stored;
	IF version.is_own AND (stored.claim_retention IS NOT NULL OR stored.token IS NOT NULL) THEN
		state := 'here';
	ELSIF stored.expires_at <= now THEN
		state := 'expired';
	ELSIF stored.fingerprint <> request_fingerprint THEN
		state := 'mismatched';
	ELSIF stored.token IS NULL THEN
		state := 'stored';
	ELSIF now BETWEEN stored.leased_at AND stored.leased_until THEN
		state := 'leased';
	ELSE
		state := 'abandoned';
	END IF;
	IF NOT is_last AND state <> 'here' AND version.xmax <> 0
		AND (state IN ('expired', 'abandoned') AND can_wait OR NOT idempotency_internal.is_unchanged(p_scope, p_key, version.ctid)) THEN
		state := 'absent';
	ELSE
		seen := version.ctid;
		writer := version.xmin;
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.read_key(text, text, bytea, boolean, boolean) IS 'read the row of a key, and its state';

-- Whether no other transaction can hold the key, so that a claim writes its row at once: a new one
-- is announced, and another is locked.  A conflict with a fixed snapshot must be explained instead.
CREATE FUNCTION idempotency_internal.is_uncontended(p_scope text, p_key text, isolation text, seen tid)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	IF isolation <> 'read committed' THEN
		RETURN false;
	ELSIF seen IS NULL THEN
		RETURN idempotency_internal.announce(p_scope, p_key);
	END IF;
	-- a row that another transaction has locked is not found
	PERFORM FROM idempotency.key AS k
	WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C" AND k.ctid = seen
	FOR NO KEY UPDATE SKIP LOCKED;
	RETURN FOUND;
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_uncontended(text, text, text, tid) IS 'whether a claim can write its row without a bounded wait';

-- The result of a claim that wrote the row "new".
CREATE FUNCTION idempotency_internal.granted(new idempotency.key, state text, has_lease boolean, for_once boolean)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	result text := idempotency_internal.set_result(new.scope, 'k', new.key);
BEGIN
	-- not distributed:
	IF has_lease THEN
		PERFORM idempotency_internal.note_call(new.token, is_grant => true);
	END IF;
	-- both layouts
	-- distributed: IF NOT has_lease AND NOT for_once THEN result := idempotency_internal.note_open(new.scope, new.key, false); END IF;
	RETURN ROW(CASE state WHEN 'abandoned' THEN 'taken_over' ELSE 'claimed' END, false,
		CASE WHEN has_lease THEN new.token END,
		CASE WHEN has_lease THEN new.attempt ELSE coalesce(new.attempt, 0) + 1 END,
		new.recovery_point, new.recovery_state,
		NULL, NULL, NULL, false, NULL, NULL, NULL)::idempotency.operation;
END
$$;
COMMENT ON FUNCTION idempotency_internal.granted(idempotency.key, text, boolean, boolean) IS 'the result of a granted claim';

-- The result of a claim that was not granted.  With "refuse", raises IK409 and IK422.
CREATE FUNCTION idempotency_internal.not_granted(
	p_scope text, p_key text, stored idempotency.key, state text, request_fingerprint bytea, refuse boolean)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	result text;
BEGIN
	IF refuse AND state <> 'stored' THEN
		CASE state
			WHEN 'mismatched' THEN
				PERFORM idempotency_internal.raise('IK422', 'idempotency key was used with another request',
					idempotency_internal.detail(p_scope, p_key),
					'A new request needs a new key; a retry repeats the request unchanged. '
					'Pass times and other values whose text depends on the session''s settings through idempotency.stable_text().');
			WHEN 'leased' THEN
				PERFORM idempotency_internal.raise_leased(p_scope, p_key, stored.leased_until);
			WHEN 'here' THEN
				PERFORM idempotency_internal.raise_claimed_here(p_scope, p_key);
			ELSE
				PERFORM idempotency_internal.raise_in_progress(p_scope, p_key);
		END CASE;
	ELSIF state = 'stored' THEN
		result := idempotency_internal.set_result(p_scope, 'r', p_key);
		RETURN idempotency_internal.replayed(stored.status, stored.headers, stored.response, stored.expires_at, NULL);
	END IF;
	result := idempotency_internal.set_result(p_scope, 'n', '');
	IF state = 'leased' THEN
		RETURN idempotency_internal.in_progress(stored, NULL, request_fingerprint);
	END IF;
	RETURN ROW(CASE state WHEN 'mismatched' THEN 'mismatched' ELSE 'in_progress' END,
		false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, CASE WHEN state <> 'mismatched' THEN 1 END, NULL, NULL)::idempotency.operation;
END
$$;
COMMENT ON FUNCTION idempotency_internal.not_granted(text, text, idempotency.key, text, bytea, boolean) IS
	'the result of a claim that was not granted';

-- Claims a key for claim(), try_claim() and once(), or returns the outcome of another
-- claim.  With "refuse", raises IK409 and IK422 instead of returning these outcomes.
--
-- The row is read first, so that a replay takes no lock and no transaction id; except in
-- SERIALIZABLE, where reading an absent key would conflict with claims of its neighbours, and
-- on Citus, where it would be one more query of another node.
CREATE FUNCTION idempotency_internal.claim(
	p_scope text, p_key text, request_fingerprint bytea, request json, lease interval,
	wait_ms bigint, retention interval, refuse boolean, for_once boolean)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	isolation text := current_setting('transaction_isolation'); -- not distributed
	-- distributed: isolation text := 'distributed';
	insert_first boolean := isolation IN ('serializable', 'distributed');
	is_last boolean := isolation = 'read committed';
	deadline timestamptz := clock_timestamp() + wait_ms * interval '1 ms';
	wait_left bigint := wait_ms;
	pause double precision := 0.01;
	conflicts integer := 0;
	version record;
	state text;
	new idempotency.key;
	is_final boolean;
	written boolean;
BEGIN
	LOOP
		SELECT * INTO version
		FROM idempotency_internal.read_key(p_scope, p_key, request_fingerprint, is_last, wait_left > 0)
		WHERE NOT insert_first;
		state := coalesce(version.state, 'absent');

		-- Write it, if the claim is granted
		IF state IN ('absent', 'expired', 'abandoned') THEN
			is_final := idempotency_internal.is_uncontended(p_scope, p_key, isolation, version.seen);
			new := idempotency_internal.granted_row(CASE state WHEN 'abandoned' THEN version.stored END,
				p_scope, p_key, request_fingerprint, request, lease, retention, for_once, is_final,
				CASE WHEN version.seen IS NOT NULL THEN coalesce((version.stored).token, (version.stored).finished_by) END);
			IF is_final THEN
				written := idempotency_internal.put(new, version.seen, version.writer);
			ELSE
				written := idempotency_internal.put_within(new, version.seen, version.writer, wait_left);
				IF written THEN -- not distributed
				-- distributed: IF written AND (lease IS NOT NULL OR clock_timestamp() > deadline - (wait_ms - 100) * interval '1 ms') THEN
					new := idempotency_internal.finish_waiting(new, lease, retention, for_once);
				END IF;
			END IF;
			EXIT WHEN written;
			IF written IS NULL THEN
				state := 'locked';
				EXIT;
			END IF;
			insert_first := false;
			is_last := true;
			conflicts := conflicts + 1;
			IF conflicts > idempotency_internal.max_conflicts() AND version.seen IS NULL THEN
				PERFORM idempotency_internal.raise_conflict(p_scope, p_key);
			END IF;
			wait_left := greatest(extract(epoch FROM deadline - clock_timestamp()) * 1000, 0);
			CONTINUE;
		END IF;

		-- Wait for a lease to end.  Only an insertion meets a row that the snapshot does not
		-- show: then the lease has ended, or is another.
		EXIT WHEN state <> 'leased';
		IF isolation <> 'read committed' THEN
			new := idempotency_internal.granted_row(NULL,
				p_scope, p_key, request_fingerprint, request, lease, retention, for_once, false);
			wait_left := greatest(extract(epoch FROM deadline - clock_timestamp()) * 1000, 0);
			IF idempotency_internal.put_within(new, NULL, NULL, wait_left) THEN
				new := idempotency_internal.finish_waiting(new, lease, retention, for_once);
				state := 'absent';
				EXIT;
			END IF;
		END IF;
		EXIT WHEN version.now >= deadline;
		PERFORM pg_sleep(least(pause, extract(epoch FROM deadline - version.now), extract(epoch FROM (version.stored).leased_until - version.now) + 0.001));
		pause := least(pause * 2, 1);
	END LOOP;

	IF state IN ('absent', 'expired', 'abandoned') THEN
		RETURN idempotency_internal.granted(new, state, lease IS NOT NULL, for_once);
	END IF;
	RETURN idempotency_internal.not_granted(p_scope, p_key, version.stored, state, request_fingerprint, refuse);
END
$$;
COMMENT ON FUNCTION idempotency_internal.claim(text, text, bytea, json, interval, bigint, interval, boolean, boolean) IS
	'claim a key, or return the outcome of another claim';

CREATE FUNCTION idempotency_internal.replayed(status smallint, headers json, response json, expires_at timestamptz, fingerprint bytea)
	RETURNS idempotency.operation
	LANGUAGE sql STABLE PARALLEL SAFE
	RETURN ROW('replayed', true, NULL, NULL, NULL, NULL, abs(status::integer), headers, response, coalesce(status < 0, false),
		NULL, nullif(expires_at, 'infinity'), fingerprint)::idempotency.operation;
COMMENT ON FUNCTION idempotency_internal.replayed(smallint, json, json, timestamptz, bytea) IS 'a stored outcome as an operation';

-- The checkpoint of another owner is shown to a caller with the same request only:
-- "request_fingerprint" is that of the caller, which did not mismatch.  The rest of the lease is in
-- whole seconds: with its microseconds, a client could compute when it began, and most of its token.
CREATE FUNCTION idempotency_internal.in_progress(stored idempotency.key, fingerprint bytea, request_fingerprint bytea)
	RETURNS idempotency.operation
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
	SELECT ROW('in_progress', false, NULL, ($1).attempt,
		CASE WHEN ($1).fingerprint IS NULL OR $3 IS NOT NULL THEN ($1).recovery_point END,
		CASE WHEN ($1).fingerprint IS NULL OR $3 IS NOT NULL THEN ($1).recovery_state END, NULL, NULL, NULL, false,
		CASE WHEN now.now BETWEEN ($1).leased_at AND ($1).leased_until
			THEN least(greatest(ceil(extract(epoch FROM ($1).leased_until - now.now)), 1), 2147483647)::integer ELSE 0 END,
		NULL, $2)::idempotency.operation
	FROM clock_timestamp() AS now (now)
$$;
COMMENT ON FUNCTION idempotency_internal.in_progress(idempotency.key, bytea, bytea) IS 'a lease of another owner as an operation';

-- The arguments of claim() and try_claim(), checked in the order of the extension.
CREATE FUNCTION idempotency_internal.claim_by_arguments(
	function text, scope text, key text, request json, lease interval, wait interval, retention interval,
	fingerprint bytea, default_wait interval, refuse boolean)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	request_fingerprint bytea := fingerprint;
	wait_ms bigint;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only(function);
	END IF;
	IF NOT idempotency_internal.names_are_valid(scope, key) THEN
		PERFORM idempotency_internal.check_names(scope, key);
	END IF;
	IF lease IS NOT NULL THEN
		PERFORM idempotency_internal.check_lease(lease);
	END IF;
	wait_ms := idempotency_internal.milliseconds(coalesce(wait, default_wait));
	retention := idempotency_internal.check_retention(retention, scope);
	IF fingerprint IS NULL THEN
		IF request IS NOT NULL THEN
			request_fingerprint := idempotency_internal.fingerprint(request::jsonb);
		END IF;
	ELSIF request IS NOT NULL THEN
		PERFORM idempotency_internal.raise('22023', 'request and fingerprint are both given',
			idempotency_internal.detail(scope, key), 'Pass the request, or a fingerprint that you computed from it.');
	ELSIF length(fingerprint) NOT BETWEEN 16 AND 64 THEN
		PERFORM idempotency_internal.raise('22023', format('fingerprint has %s bytes', length(fingerprint)),
			idempotency_internal.detail(scope, key),
			'Pass a cryptographic digest of 16 to 64 bytes, such as idempotency.fingerprint() returns.');
	END IF;
	IF lease IS NOT NULL AND request IS NOT NULL THEN
		PERFORM idempotency_internal.check_size(scope, key, 'request', octet_length(request::text));
	END IF;
	RETURN idempotency_internal.claim(scope, key, request_fingerprint, request, lease, wait_ms, retention, refuse, false);
END
$$;
COMMENT ON FUNCTION idempotency_internal.claim_by_arguments(text, text, text, json, interval, interval, interval, bytea, interval, boolean) IS
	'check the arguments of claim() and try_claim(), and claim';

-- The same, for callers whose search path is that of their client.
CREATE FUNCTION idempotency_internal.claim_any(
	function text, scope text, key text, request json, lease interval, wait interval, retention interval, fingerprint bytea)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	refuse boolean := function = 'claim';
BEGIN
	RETURN idempotency_internal.claim_by_arguments(function, scope, key, request, lease, wait, retention, fingerprint,
		CASE WHEN refuse THEN idempotency_internal.default_wait(scope) ELSE interval '0' END, refuse);
END
$$;
COMMENT ON FUNCTION idempotency_internal.claim_any(text, text, text, json, interval, interval, interval, bytea) IS
	'claim() and try_claim() with any arguments, and under any search path';

-- Whether a claim needs no checks of its names and of settings but these.  "result" is that of
-- a granted claim (see above).  A name that begins as an array or an object might be one.  One
-- comparison for all settings: those of the edition are empty or missing.  A body in SQL's own
-- syntax is parsed once, when it is created, so no search path changes its meaning.
CREATE FUNCTION idempotency_internal.is_plain(result text)
	RETURNS boolean
	LANGUAGE sql STABLE PARALLEL SAFE
	RETURN octet_length(result) <= 255
		AND result ~ E'^\x1E[^[{\\u0001-\\u001F\\u007F-\\u009F][^\\u0001-\\u001F\\u007F-\\u009F]*\x1Fk[^[{\\u0001-\\u001F\\u007F-\\u009F][^\\u0001-\\u001F\\u007F-\\u009F]*$'
		AND concat(current_setting('idempotency.scope_prefix', true), current_setting('idempotency.retention', true),
			current_setting('idempotency_internal.results', true),
			current_setting('transaction_isolation'), ', read only ', current_setting('transaction_read_only')) = 'read committed, read only off';
COMMENT ON FUNCTION idempotency_internal.is_plain(text) IS 'whether a claim needs no more checks';

-- claim() and try_claim() have one body, for each type of the request.  A first claim without a lease, and a replay, of a
-- transaction in READ COMMITTED need few statements, which are here; claim_any() has the
-- rest, and finds each outcome again.
--
-- These functions, complete() and the commit guard are most of the cost of a charge.
DO $do$
DECLARE
	form record;
BEGIN
	FOR form IN
		SELECT *
		FROM (VALUES
			('claim', 'claim an operation, or replay its outcome; any other outcome is an error', true),
			('try_claim', 'claim an operation, or return why that failed; check the outcome', false)
		) AS f (name, comment, refuse), (VALUES ('text', ' DEFAULT NULL'), ('json', ''), ('jsonb', '')) AS t (type, with_default)
	LOOP
		EXECUTE format($create$
CREATE FUNCTION idempotency.%1$I(
	scope text, key text, request %2$s%3$s,
	lease interval DEFAULT NULL, wait interval DEFAULT NULL, retention interval DEFAULT NULL,
	fingerprint bytea DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
	result text := E'\x1E' || scope || E'\x1Fk' || key;
	request_fingerprint bytea;
	stored record;
	-- distributed: operation idempotency.operation;
BEGIN
	IF lease IS NULL AND wait IS NULL AND retention IS NULL AND fingerprint IS NULL
		AND idempotency_internal.is_plain(result)
	THEN
		IF request IS NOT NULL THEN
			request_fingerprint := idempotency_internal.fingerprint(request::jsonb);
		END IF;
		-- not distributed:
		SELECT k.expires_at, k.status, k.fingerprint, k.response, k.headers, k.token, k.claim_retention
		INTO stored
		FROM idempotency.key AS k
		WHERE k.scope = %1$I.scope COLLATE "C" AND k.key = %1$I.key COLLATE "C";
		IF NOT FOUND AND idempotency_internal.announce(scope, key) THEN
			INSERT INTO idempotency.key (created_at, expires_at, scope, key, fingerprint, claimed_in, claim_retention)
			VALUES (clock_timestamp(), '-infinity', scope, key, request_fingerprint,
				pg_current_xact_id(), idempotency_internal.configured_retention(scope))
			ON CONFLICT DO NOTHING;
			IF FOUND THEN
				result := set_config('idempotency_internal.results', result, true);
				RETURN '(claimed,f,,1,,,,,,f,,,)'::idempotency.operation;
			END IF;
		ELSIF stored.token IS NULL AND stored.claim_retention IS NULL
			AND stored.expires_at > clock_timestamp()
			AND (stored.fingerprint = request_fingerprint) IS NOT FALSE
		THEN
			result := set_config('idempotency_internal.results', replace(result, E'\x1Fk', E'\x1Fr'), true);
			RETURN idempotency_internal.replayed(stored.status, stored.headers, stored.response, stored.expires_at, NULL);
		END IF;
		-- both layouts
		-- distributed: operation := idempotency_internal.claim_first(scope, key, request_fingerprint, result, %4$L);
		-- distributed: IF operation.outcome <> 'in_progress' THEN RETURN operation; END IF;
		-- distributed: IF operation.outcome IS NOT NULL THEN wait := '0'; END IF;
	END IF;
	-- the last statement prints a jsonb request
	IF pg_typeof(request) = 'jsonb'::regtype THEN
		PERFORM idempotency_internal.check_numbers(request::jsonb);
	END IF;
	RETURN idempotency_internal.claim_any(%1$L, scope, key, request::text::json, lease, wait, retention, fingerprint);
END
$function$
			$create$, form.name, form.type, form.with_default, form.refuse);
		EXECUTE format('COMMENT ON FUNCTION idempotency.%I(text, text, %s, interval, interval, interval, bytea) IS %L',
			form.name, form.type, form.comment);
	END LOOP;
END
$do$;

-- ---------------------------------------------------------------------------
-- The commit guard: IK428 for a claim that is still open at commit
-- ---------------------------------------------------------------------------

-- At commit, the first event of an open claim only updates its row, which queues a second
-- event behind all deferred triggers: one of them can complete the claim.  The first events
-- also note the open claims in a setting, which the error counts.
--
-- A transaction block ends in a statement that begins later than the block.  In autocommit,
-- the simple protocol has one statement; in the extended one, which begins a statement with
-- each message, there is none any more when the transaction ends.
--
-- PREPARE TRANSACTION fires it, too, and so does SET CONSTRAINTS ... IMMEDIATE, which cannot
-- turn it off: a rollback to a savepoint makes an event pending again, and every claim queues
-- its own.
CREATE FUNCTION idempotency_internal.refuse_commit(new idempotency.key)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	others bigint;
BEGIN
	IF new.proven_in IS DISTINCT FROM pg_current_xact_id() THEN
		PERFORM set_config('idempotency_internal.open',
			concat(current_setting('idempotency_internal.open', true), chr(30), new.scope, chr(31), new.key), true);
		UPDATE idempotency.key AS k SET proven_in = pg_current_xact_id()
		WHERE k.scope = new.scope AND k.key = new.key AND k.claim_retention IS NOT NULL;
		RETURN;
	END IF;

	SELECT count(DISTINCT k.ctid) - 1 INTO others
	FROM unnest(string_to_array(current_setting('idempotency_internal.open', true), chr(30))) AS o (name)
	JOIN idempotency.key AS k ON k.scope = split_part(o.name, chr(31), 1) AND k.key = split_part(o.name, chr(31), 2)
	WHERE k.claim_retention IS NOT NULL;
	PERFORM idempotency_internal.raise('IK428',
		format('cannot %s a transaction with an open idempotency claim',
			CASE WHEN current_query() ~* '^ *prepare +transaction' THEN 'prepare' ELSE 'commit' END),
		CASE
			WHEN others > 0 THEN format('Scope "%s", key "%s", and %s more.', new.scope, new.key, others)
			ELSE idempotency_internal.detail(new.scope, new.key)
		END,
		CASE
			WHEN statement_timestamp() > transaction_timestamp() AND current_query() !~* E'^\\s*(call|do)\\M'
				THEN 'Call idempotency.complete(), fail() or release() in the transaction that claimed.'
			ELSE 'This statement was a transaction of its own (autocommit). Put BEGIN and '
				'COMMIT around idempotency.claim(), your writes and '
				'idempotency.complete(). A function that claims, and a procedure before '
				'its own COMMIT, must also complete, fail or release.'
		END);
END
$$;
COMMENT ON FUNCTION idempotency_internal.refuse_commit(idempotency.key) IS 'handle the event of an open claim';

CREATE FUNCTION idempotency_internal.require_outcome()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM FROM idempotency.key AS k
	WHERE k.scope = new.scope AND k.key = new.key AND k.claim_retention IS NOT NULL;
	IF FOUND THEN
		PERFORM idempotency_internal.refuse_commit(new); -- not distributed
		-- distributed: PERFORM idempotency_internal.refuse_commit(jsonb_populate_record(NULL::idempotency.key, to_jsonb(new)));
	END IF;
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.require_outcome() IS 'trigger: refuse to commit an open claim';

-- Each UPDATE that opens a claim sets claimed_in or proven_in.  That of complete() does not.
CREATE CONSTRAINT TRIGGER require_outcome AFTER INSERT OR UPDATE OF claimed_in, proven_in ON idempotency.key
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (new.claim_retention IS NOT NULL)
	EXECUTE FUNCTION idempotency_internal.require_outcome();
COMMENT ON TRIGGER require_outcome ON idempotency.key IS 'an open claim must be completed, failed or released';

-- ---------------------------------------------------------------------------
-- Owners: complete, fail, release, renew, checkpoint
-- ---------------------------------------------------------------------------

-- Tells whether a key has no row.  Unlike a query, an insertion also meets rows that the
-- transaction's snapshot does not show: for these the server raises 40001.
CREATE FUNCTION idempotency_internal.is_absent(p_scope text, p_key text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	IF NOT idempotency_internal.put(
			idempotency_internal.granted_row(NULL, p_scope, p_key, NULL, NULL, NULL, interval '-1 s', true), NULL, NULL) THEN
		RETURN false;
	END IF;
	DELETE FROM idempotency.key AS k
	WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C" AND k.claimed_in = pg_current_xact_id();
	RETURN true;
EXCEPTION
	WHEN serialization_failure THEN
		RETURN false;
END
$$;
COMMENT ON FUNCTION idempotency_internal.is_absent(text, text) IS 'whether a key has no row, whatever the snapshot shows';

-- Locks the row of a key until the transaction ends, and returns it; NULL if there is none, or
-- none with the token "p_token" if that is given.  Raises IK409 if another transaction holds it
-- for longer than idempotency.wait, and 40001 if the transaction's snapshot does not show its
-- last version.
CREATE FUNCTION idempotency_internal.lock_row(p_scope text, p_key text, p_token bigint)
	RETURNS idempotency.key
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	lock_timeout text := current_setting('lock_timeout');
	bounded boolean;
	stored idempotency.key;
BEGIN
	IF current_setting('transaction_isolation') = 'read committed' THEN
		SELECT * INTO stored FROM idempotency.key AS k WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C"
		FOR NO KEY UPDATE SKIP LOCKED;
		IF FOUND THEN
			RETURN stored;
		END IF;
	END IF;
	LOCK TABLE idempotency.key IN ROW EXCLUSIVE MODE; -- not distributed
	BEGIN
		bounded := idempotency_internal.bound_wait(idempotency_internal.milliseconds(idempotency_internal.default_wait(p_scope)));
		SELECT * INTO stored FROM idempotency.key AS k
		WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C" AND (p_token IS NULL OR k.token = p_token)
		FOR NO KEY UPDATE;
		PERFORM set_config('lock_timeout', lock_timeout, true); -- not distributed
		-- distributed: bounded := idempotency_internal.set_lock_timeout(lock_timeout);
	EXCEPTION
		WHEN lock_not_available THEN
			IF NOT bounded THEN
				RAISE;
			END IF;
			PERFORM idempotency_internal.raise_in_progress(p_scope, p_key);
		WHEN serialization_failure THEN
			IF idempotency_internal.is_absent(p_scope, p_key) THEN
				RETURN NULL;
			END IF;
			PERFORM idempotency_internal.raise_concurrent(p_scope, p_key);
	END;
	RETURN stored;
END
$$;
COMMENT ON FUNCTION idempotency_internal.lock_row(text, text, bigint) IS 'lock the row of a key';

CREATE FUNCTION idempotency_internal.is_owner(stored idempotency.key, token bigint)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$SELECT (($1).token = $2 AND ($1).claim_retention IS NULL AND ($1).expires_at > clock_timestamp()) IS TRUE$$;
COMMENT ON FUNCTION idempotency_internal.is_owner(idempotency.key, bigint) IS 'whether a token is that of a lease';

-- What every function of an owner does first.  Returns the token by which the caller owns
-- the operation, or NULL for a claim of this transaction without a lease.
CREATE FUNCTION idempotency_internal.own(function text, scope text, key text, token bigint)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	stored idempotency.key;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only(function);
	END IF;
	-- the table before the sequence of note_call(), as claims lock them, and what drops both
	LOCK TABLE idempotency.key IN ACCESS SHARE MODE; -- not distributed
	PERFORM idempotency_internal.note_call(token) WHERE token IS NOT NULL; -- not distributed
	IF NOT idempotency_internal.names_are_valid(scope, key) THEN
		PERFORM idempotency_internal.check_names(scope, key);
	END IF;
	IF token IS NOT NULL THEN
		-- A former owner is refused without a wait.  While the row is locked, no other owner
		-- can take over.
		SELECT * INTO stored FROM idempotency.key AS k
		WHERE k.scope = own.scope COLLATE "C" AND k.key = own.key COLLATE "C" AND k.token = own.token;
		IF idempotency_internal.is_owner(stored, token) THEN
			stored := idempotency_internal.lock_row(scope, key, token);
		END IF;
		IF NOT idempotency_internal.is_owner(stored, token) THEN
			PERFORM idempotency_internal.raise_lost(scope, key, token);
		END IF;
		RETURN token;
	END IF;
	SELECT * INTO stored FROM idempotency.key AS k
	WHERE k.scope = own.scope COLLATE "C" AND k.key = own.key COLLATE "C" AND k.claimed_in = pg_current_xact_id_if_assigned()
		AND (k.claim_retention IS NOT NULL OR k.token IS NOT NULL) AND idempotency_internal.is_written_here(k.xmin);
	IF NOT FOUND THEN
		PERFORM idempotency_internal.note_call(NULL); -- not distributed
		PERFORM idempotency_internal.raise_no_claim(scope, key);
	ELSIF stored.claim_retention IS NULL THEN
		PERFORM idempotency_internal.note_call(stored.token); -- not distributed
		RETURN stored.token;
	END IF;
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.own(text, text, text, bigint) IS 'check that the caller owns an operation';

-- Stores the outcome of an operation, for complete() and fail().  Without a token and leases it is
-- one statement, whose condition is the test of ownership.  Response and headers are text until
-- own() has noted the call: text that is no JSON fails a call whose lease must be proven again.
CREATE FUNCTION idempotency_internal.finish(
	function text, p_scope text, p_key text, p_response text, p_status integer, p_headers text,
	p_token bigint, p_retention interval, omit_large boolean)
	RETURNS json
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	now timestamptz;
	answer json;
	stored_response json;
	stored_headers json;
	bytes bigint;
	failed boolean := function = 'fail';
	finished_by bigint;
BEGIN
	IF p_token IS NOT NULL OR coalesce(current_setting('idempotency_internal.call', true), '') <> ''
		OR current_setting('transaction_read_only') = 'on'
		OR NOT idempotency_internal.names_are_valid(p_scope, p_key)
		OR (p_status BETWEEN 100 AND 599) IS NOT TRUE OR p_headers IS NOT NULL OR p_retention IS NOT NULL THEN
		PERFORM idempotency_internal.own(function, p_scope, p_key, p_token);
	END IF;
	answer := p_response;
	stored_response := answer;
	stored_headers := p_headers;
	IF p_retention IS NOT NULL THEN
		PERFORM idempotency_internal.check_retention(p_retention, p_scope);
	END IF;
	IF (p_status BETWEEN 100 AND 599) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', 'status must be between 100 and 599',
			idempotency_internal.detail(p_scope, p_key), 'Pass an HTTP status code.');
	ELSIF left(ltrim(p_headers, E' \t\r\n'), 1) <> '{' THEN
		PERFORM idempotency_internal.raise('22023', 'headers must be a JSON object',
			idempotency_internal.detail(p_scope, p_key), 'Pass an object of header names and values.');
	ELSIF p_response IS NOT NULL OR p_headers IS NOT NULL THEN
		-- below the least possible limit, the setting need not be read
		bytes := coalesce(octet_length(p_response), 0) + coalesce(octet_length(p_headers), 0);
		IF bytes > 1024 THEN
			PERFORM idempotency_internal.own(function, p_scope, p_key, p_token);
			IF omit_large AND bytes > idempotency_internal.max_response_size(p_scope) THEN
				stored_response := NULL;
				-- appended as text: jsonb refuses values that json takes
				p_headers := CASE WHEN octet_length(p_headers) <= idempotency_internal.max_response_size(p_scope) THEN p_headers ELSE '{}' END;
				stored_headers := regexp_replace(p_headers, E'}\\s*$',
					CASE WHEN p_headers LIKE '%"%' THEN ', ' ELSE '' END || '"Idempotency-Response": "omitted"}');
			ELSE
				PERFORM idempotency_internal.check_size(p_scope, p_key, 'response', bytes);
			END IF;
		END IF;
	END IF;

	now := clock_timestamp();
	UPDATE idempotency.key AS k SET
		created_at = CASE WHEN k.expires_at <= now THEN now ELSE k.created_at END,
		expires_at = idempotency_internal.retention_end(
			coalesce(p_retention, k.claim_retention, k.retention, interval '-1 s'), now),
		status = CASE WHEN failed THEN -p_status ELSE p_status END,
		fingerprint = coalesce(k.claim_fingerprint, k.fingerprint),
		response = stored_response,
		headers = stored_headers,
		token = NULL,
		attempt = NULL,
		leased_at = NULL,
		leased_until = NULL,
		recovery_point = NULL,
		recovery_state = NULL,
		request = NULL,
		retention = NULL,
		finished_by = CASE WHEN k.claim_retention IS NULL THEN k.token END,
		proven_in = CASE WHEN p_token IS NOT NULL THEN pg_current_xact_id() END,
		claim_fingerprint = NULL,
		claim_retention = NULL
	WHERE k.scope = p_scope COLLATE "C" AND k.key = p_key COLLATE "C"
		AND CASE
			WHEN p_token IS NOT NULL THEN k.token = p_token
			ELSE k.claimed_in = pg_current_xact_id_if_assigned() AND (k.claim_retention IS NOT NULL OR k.token IS NOT NULL)
				AND idempotency_internal.is_written_here(k.xmin)
		END
	RETURNING k.finished_by INTO finished_by;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.note_call(NULL); -- not distributed
		PERFORM idempotency_internal.raise_no_claim(p_scope, p_key);
	ELSIF p_token IS NOT NULL THEN
		PERFORM idempotency_internal.set_result(p_scope, 'k', p_key);
	ELSIF finished_by IS NOT NULL THEN
		PERFORM idempotency_internal.note_call(finished_by); -- not distributed
		NULL;
	-- distributed: ELSIF idempotency_internal.note_closed(p_scope, p_key, false) THEN NULL;
	END IF;
	RETURN answer;
END
$$;
COMMENT ON FUNCTION idempotency_internal.finish(text, text, text, text, integer, text, bigint, interval, boolean) IS
	'store the outcome of an operation that the caller owns';

CREATE FUNCTION idempotency.complete(
	scope text, key text, response text DEFAULT NULL,
	status integer DEFAULT 200, headers text DEFAULT NULL,
	token bigint DEFAULT NULL, retention interval DEFAULT NULL,
	omit_large boolean DEFAULT false)
	RETURNS json
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	document json;
	now timestamptz;
BEGIN
	-- The claim of a key that had no row, and a response below the least possible limit, in a
	-- transaction without leases: text that is no JSON then leaves a claim that cannot commit.
	-- The condition of the UPDATE is the test of ownership: an open claim is never committed, so
	-- the transaction that sees one has written it, and needs no is_written_here().
	IF token IS NULL AND retention IS NULL AND headers IS NULL
		AND (octet_length(response) > 1024) IS NOT TRUE
		AND coalesce(status, 200) >= 100 AND coalesce(status, 200) <= 599
		AND current_setting('transaction_read_only') = 'off'
		AND coalesce(current_setting('idempotency_internal.call', true), '') = ''
	THEN
		document := response;
		now := clock_timestamp();
		-- not distributed:
		UPDATE idempotency.key AS k SET
			created_at = now,
			expires_at = now + k.claim_retention,
			status = coalesce(complete.status, 200),
			response = document,
			claim_retention = NULL
		WHERE k.scope = complete.scope COLLATE "C"
			AND k.key = complete.key COLLATE "C"
			AND k.claimed_in = pg_current_xact_id_if_assigned()
			AND k.claim_retention <> '-1 s' AND k.token IS NULL AND k.claim_fingerprint IS NULL;
		IF FOUND THEN
			RETURN document;
		END IF;
		-- both layouts
		-- distributed: IF idempotency_internal.complete_first(scope, key, coalesce(status, 200), document) THEN RETURN document; END IF;
	END IF;
	RETURN idempotency_internal.finish('complete', scope, key, response,
		coalesce(status, 200), headers, token, retention, omit_large);
END
$$;
COMMENT ON FUNCTION idempotency.complete(text, text, text, integer, text, bigint, interval, boolean) IS
	'store the success of a claimed operation, and return its response';

CREATE FUNCTION idempotency.fail(
	scope text, key text, response text,
	status integer, headers text DEFAULT NULL,
	token bigint DEFAULT NULL, retention interval DEFAULT NULL,
	omit_large boolean DEFAULT false)
	RETURNS json
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idempotency_internal.finish('fail', scope, key, response,
		status, headers, token, retention, omit_large);
END
$$;
COMMENT ON FUNCTION idempotency.fail(text, text, text, integer, text, bigint, interval, boolean) IS
	'store the final failure of a claimed operation, and return its response';

-- A lease with a checkpoint stays, with a token that no owner has; a claim on an abandoned
-- operation leaves the lease as it was; any other row goes.
CREATE FUNCTION idempotency.release(scope text, key text, token bigint DEFAULT NULL)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	own_token bigint := idempotency_internal.own('release', scope, key, token);
	-- distributed: next_token bigint := CASE WHEN own_token IS NOT NULL THEN idempotency_internal.new_token(own_token) END;
	now timestamptz := clock_timestamp();
BEGIN
	IF own_token IS NULL THEN
		-- distributed: PERFORM idempotency_internal.note_closed(scope, key, false);
		UPDATE idempotency.key AS k SET claimed_in = NULL, claim_fingerprint = NULL, claim_retention = NULL
		WHERE k.scope = release.scope COLLATE "C" AND k.key = release.key COLLATE "C" AND k.expires_at > now
			AND k.claim_retention IS NOT NULL;
	ELSE
		UPDATE idempotency.key AS k SET
			token = idempotency_internal.new_token(k.token), -- not distributed
			-- distributed: token = next_token,
			leased_at = now,
			leased_until = '-infinity',
			expires_at = idempotency_internal.retention_end(coalesce(k.retention, interval '-1 s'), now),
			claimed_in = NULL,
			proven_in = NULL
		WHERE k.scope = release.scope COLLATE "C" AND k.key = release.key COLLATE "C" AND k.token = own_token
			AND k.recovery_point IS NOT NULL;
	END IF;
	IF NOT FOUND THEN
		PERFORM idempotency_internal.outlive(own_token);
		DELETE FROM idempotency.key AS k
		WHERE k.scope = release.scope COLLATE "C" AND k.key = release.key COLLATE "C"
			AND CASE WHEN own_token IS NULL THEN k.claim_retention IS NOT NULL ELSE k.token = own_token END;
	END IF;
	PERFORM idempotency_internal.set_result(scope, 'n', '');
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency.release(text, text, bigint) IS
	'release a claim without an outcome; true';

CREATE FUNCTION idempotency.renew(scope text, key text, token bigint, lease interval)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	own_token bigint := idempotency_internal.own('renew', scope, key, token);
	now timestamptz := clock_timestamp();
BEGIN
	IF lease IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'lease is missing', NULL,
			'Pass the time within which the owner renews the lease, such as ''30 seconds''.');
	END IF;
	PERFORM idempotency_internal.check_lease(lease);
	IF own_token IS NULL THEN
		PERFORM idempotency_internal.raise_no_lease(scope, key);
	END IF;
	UPDATE idempotency.key AS k SET
		leased_at = now,
		leased_until = now + lease,
		expires_at = idempotency_internal.retention_end(coalesce(k.retention, interval '-1 s'), now + lease),
		proven_in = pg_current_xact_id()
	WHERE k.scope = renew.scope COLLATE "C" AND k.key = renew.key COLLATE "C" AND k.token = own_token;
	PERFORM idempotency_internal.set_result(scope, 'k', key);
	RETURN now + lease;
END
$$;
COMMENT ON FUNCTION idempotency.renew(text, text, bigint, interval) IS
	'restart a lease from now (heartbeat); returns when it ends';

CREATE FUNCTION idempotency.checkpoint(
	scope text, key text, token bigint, recovery_point text,
	state text DEFAULT NULL)
	RETURNS timestamptz
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	own_token bigint := idempotency_internal.own('checkpoint', scope, key, token);
	new_state json := state::json;
	lease_end timestamptz;
BEGIN
	IF coalesce(recovery_point, '') = '' THEN
		PERFORM idempotency_internal.raise('22023', 'recovery point is missing', NULL,
			'Name the step from which the next owner continues.');
	ELSIF octet_length(recovery_point) > 255 THEN
		PERFORM idempotency_internal.raise('22023', 'recovery point is too long', NULL,
			'Name the step in at most 255 bytes, and pass other data as the state.');
	ELSIF new_state IS NOT NULL THEN
		PERFORM idempotency_internal.check_size(scope, key, 'state', octet_length(new_state::text));
	END IF;
	IF own_token IS NULL THEN
		PERFORM idempotency_internal.raise_no_lease(scope, key);
	END IF;
	UPDATE idempotency.key AS k SET
		recovery_point = checkpoint.recovery_point,
		recovery_state = new_state,
		proven_in = pg_current_xact_id()
	WHERE k.scope = checkpoint.scope COLLATE "C" AND k.key = checkpoint.key COLLATE "C" AND k.token = own_token
	RETURNING k.leased_until INTO lease_end;
	PERFORM idempotency_internal.set_result(scope, 'k', key);
	RETURN lease_end;
END
$$;
COMMENT ON FUNCTION idempotency.checkpoint(text, text, bigint, text, text) IS
	'store a recovery point, from which the next owner continues; returns when the lease ends';

-- Skips an operation that another transaction holds, so that completers never wait for each
-- other, and never get the same one.
CREATE FUNCTION idempotency.claim_abandoned(scope text, lease interval, max integer DEFAULT 1)
	RETURNS SETOF idempotency.abandoned
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	SET enable_bitmapscan = off SET enable_sort = off SET jit = off -- the index has the order, also before the first ANALYZE
	SET plan_cache_mode = force_custom_plan -- the plan depends on the pattern
AS $$
DECLARE
	prefix text;
	is_exact boolean;
	is_last boolean := current_setting('transaction_isolation') = 'read committed';
	found_row idempotency.key;
	new idempotency.key;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('claim_abandoned');
	END IF;
	PERFORM idempotency_internal.check_pattern(scope);
	prefix := idempotency_internal.pattern_prefix(scope);
	is_exact := scope ~ E'^(\x3F:\\\\.|[^\\\\*])*$';
	PERFORM idempotency_internal.check_prefix(prefix, scope);
	-- distributed: IF split_part(scope, '/', 1) <> split_part(prefix, '/', 1) THEN
	-- distributed: 	PERFORM idempotency_internal.raise('0A000', 'pattern of scopes does not name the tenant', NULL, 'Pass a pattern such as "acme/*".');
	-- distributed: END IF;
	IF lease IS NULL THEN
		PERFORM idempotency_internal.raise('22023', 'lease is missing', NULL,
			'Pass the time within which the completer renews the lease, such as ''30 seconds''.');
	END IF;
	PERFORM idempotency_internal.check_lease(lease);
	IF (max > 0) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', 'max must be positive', NULL,
			'Pass the maximum number of operations to take over.');
	END IF;

	-- The clock is read for each row, and again for a row that has changed since the query
	-- began: compared with an earlier time, a new lease would begin in the future.  A fixed
	-- snapshot shows rows that cannot be locked any more, which are skipped, too.
	FOR found_row IN
		SELECT k.*
		FROM idempotency.key AS k
		WHERE CASE WHEN is_exact THEN k.scope = prefix COLLATE "C" ELSE k.scope LIKE idempotency_internal.like_pattern(claim_abandoned.scope) COLLATE "C" END
			-- distributed: AND k.tenant = home
			AND k.token IS NOT NULL AND k.expires_at > clock_timestamp()
			AND clock_timestamp() NOT BETWEEN k.leased_at AND k.leased_until
			AND k.claim_retention IS NULL
			AND (is_last OR k.xmax = 0 OR idempotency_internal.is_unchanged(k.scope, k.key, k.ctid)) -- not distributed
			AND (pg_current_xact_id() IN (k.claimed_in, k.proven_in) AND idempotency_internal.is_written_here(k.xmin)) IS NOT TRUE
		ORDER BY k.token
		LIMIT max
		FOR NO KEY UPDATE OF k SKIP LOCKED
	LOOP
		new := idempotency_internal.granted_row(found_row, found_row.scope, found_row.key, NULL, NULL,
			lease, coalesce(found_row.retention, interval '-1 s'), false);
		UPDATE idempotency.key AS k SET
			expires_at = new.expires_at,
			token = new.token,
			attempt = new.attempt,
			leased_at = new.leased_at,
			leased_until = new.leased_until,
			claimed_in = new.claimed_in
		WHERE k.scope = new.scope AND k.key = new.key;
		PERFORM idempotency_internal.note_call(new.token, is_grant => true); -- not distributed
		PERFORM idempotency_internal.set_result(new.scope, 'k', new.key);
		RETURN NEXT ROW(new.token, new.scope, new.key, new.request, new.attempt, new.recovery_point, new.recovery_state)::idempotency.abandoned;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency.claim_abandoned(text, interval, integer) IS
	'take over abandoned operations, oldest token first';

-- ---------------------------------------------------------------------------
-- The inbox: once and once_many
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.once(scope text, key text, retention interval DEFAULT NULL)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	operation idempotency.operation;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('once');
	END IF;
	IF NOT idempotency_internal.names_are_valid(scope, key) THEN
		PERFORM idempotency_internal.check_names(scope, key);
	END IF;
	retention := idempotency_internal.check_retention(retention, scope);
	operation := idempotency_internal.claim(scope, key, NULL, NULL, NULL,
		idempotency_internal.milliseconds(idempotency_internal.default_wait(scope)), retention, true, true);
	RETURN NOT operation.replayed;
END
$$;
COMMENT ON FUNCTION idempotency.once(text, text, interval) IS
	'record a message; true the first time';

-- The new keys in one statement, in bytewise order, so that calls that overlap cannot
-- deadlock; then, in the same order, those whose rows have expired or are abandoned.
CREATE FUNCTION idempotency_internal.record_many(p_scope text, names text[], retention interval)
	RETURNS text[]
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	name text;
	fresh text[];
	-- not distributed:
	started timestamptz := clock_timestamp();
	formed timestamptz[];
	places tid[];
	waited record;
	-- both layouts
	version record;
	stored idempotency.key;
	now timestamptz;
BEGIN
	-- the clock is read for each row, because an insertion can wait
	-- not distributed:
	WITH inserted AS (
		INSERT INTO idempotency.key AS k (expires_at, created_at, scope, key, claimed_in)
		SELECT idempotency_internal.retention_end(retention, clock_timestamp()), clock_timestamp(),
			p_scope, n.name, pg_current_xact_id()
		FROM unnest(names) WITH ORDINALITY AS n (name)
		ORDER BY n.ordinality
		ON CONFLICT DO NOTHING
		RETURNING k.key, k.created_at, k.ctid
	)
	SELECT coalesce(array_agg(i.key), '{}'), array_agg(i.created_at), array_agg(i.ctid) INTO fresh, formed, places FROM inserted AS i;
	-- A row is formed before its wait: the next row, or the end, tells how long that was.
	-- By its place, the row is found without a predicate lock.
	IF clock_timestamp() > started + interval '10 ms' THEN
		FOR waited IN
			SELECT * FROM (
				SELECT f.place, f.formed_at, lead(f.formed_at, 1, clock_timestamp()) OVER (ORDER BY f.ordinality) AS written_at
				FROM unnest(formed, places) WITH ORDINALITY AS f (formed_at, place)
			) AS w
			WHERE w.written_at > w.formed_at + interval '10 ms'
		LOOP
			UPDATE idempotency.key AS k SET
				created_at = waited.written_at,
				expires_at = idempotency_internal.retention_end(record_many.retention, waited.written_at)
			WHERE k.ctid = waited.place;
		END LOOP;
	END IF;
	-- both layouts
	-- distributed: fresh := '{}';
	IF cardinality(fresh) = cardinality(names) THEN
		RETURN fresh;
	END IF;

	FOREACH name IN ARRAY ARRAY(SELECT n.name FROM unnest(names) WITH ORDINALITY AS n (name)
		WHERE n.name <> ALL (fresh) ORDER BY n.ordinality)
	LOOP
		FOR conflicts IN 0 .. idempotency_internal.max_conflicts() LOOP
			SELECT k AS stored, k.ctid, k.xmin,
				CASE WHEN pg_current_xact_id_if_assigned() IN (k.claimed_in, k.proven_in) THEN idempotency_internal.is_written_here(k.xmin) END AS is_own
			INTO version
			FROM idempotency.key AS k
			WHERE k.scope = p_scope COLLATE "C" AND k.key = name COLLATE "C"
			ORDER BY is_own DESC NULLS LAST -- not distributed
			LIMIT 1;
			now := clock_timestamp();
			stored := version.stored;
			IF stored.scope IS NULL THEN
				NULL; -- deleted meanwhile
			ELSIF version.is_own AND (stored.claim_retention IS NOT NULL OR stored.token IS NOT NULL) THEN
				PERFORM idempotency_internal.raise_claimed_here(p_scope, name);
			ELSIF stored.expires_at > now AND stored.token IS NULL THEN
				EXIT;
			ELSIF stored.expires_at > now AND now BETWEEN stored.leased_at AND stored.leased_until THEN
				PERFORM idempotency_internal.raise_leased(p_scope, name, stored.leased_until);
			END IF;
			IF idempotency_internal.put(idempotency_internal.granted_row(
					CASE WHEN stored.expires_at > now THEN stored END,
					p_scope, name, NULL, NULL, NULL, retention, true), version.ctid, version.xmin) THEN
				fresh := fresh || name;
				EXIT;
			END IF;
			IF conflicts = idempotency_internal.max_conflicts() THEN
				PERFORM idempotency_internal.raise_conflict(p_scope, name);
			END IF;
		END LOOP;
	END LOOP;
	RETURN fresh;
END
$$;
COMMENT ON FUNCTION idempotency_internal.record_many(text, text[], interval) IS 'record sorted keys, and return the new ones';

CREATE FUNCTION idempotency.once_many(scope text, keys anycompatiblearray, retention interval DEFAULT NULL)
	RETURNS SETOF text
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	names text[];
	name text;
	fresh text[];
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('once_many');
	END IF;
	-- Check and sort the keys
	IF NOT idempotency_internal.names_are_valid(scope, scope) THEN
		PERFORM idempotency_internal.check_scope(scope);
	END IF;
	retention := idempotency_internal.check_retention(retention, scope);
	IF keys IS NULL THEN
		PERFORM idempotency_internal.raise_missing('key');
	ELSIF array_ndims(keys) > 1 THEN
		PERFORM idempotency_internal.raise('2202E', 'idempotency keys must be an array of one dimension', NULL,
			'Flatten the array, for instance with unnest().');
	ELSIF pg_typeof(keys) <> ALL ('{text[],character varying[],character[],name[],uuid[],smallint[],integer[],bigint[]}'::regtype[]) THEN
		PERFORM idempotency_internal.raise('42883', format('keys of type %s cannot be used', pg_typeof(keys)), NULL,
			'Pass an array of text, uuid or integers.');
	END IF;
	names := keys::text[];
	FOREACH name IN ARRAY names LOOP
		IF NOT idempotency_internal.names_are_valid(scope, name) THEN
			PERFORM idempotency_internal.check_name('key', name);
		END IF;
	END LOOP;
	IF cardinality(names) = 0 THEN
		RETURN;
	END IF;
	names := ARRAY(SELECT DISTINCT n.name COLLATE "C" FROM unnest(names) AS n (name) ORDER BY 1);

	-- Record them; a subtransaction is necessary only to explain the server's 40001
	IF current_setting('transaction_isolation') = 'read committed' THEN
		fresh := idempotency_internal.record_many(scope, names, retention);
	ELSE
		BEGIN
			fresh := idempotency_internal.record_many(scope, names, retention);
		EXCEPTION
			WHEN serialization_failure THEN
				PERFORM idempotency_internal.raise('40001', 'could not serialize access due to a concurrent idempotency key',
					format('Scope "%s", one of %s keys from "%s" on.', scope, cardinality(names), names[1]),
					'Retry the transaction with the same keys.');
		END;
	END IF;

	IF cardinality(fresh) > 0 THEN
		PERFORM idempotency_internal.set_result(scope, 'b', fresh[1]);
	ELSE
		PERFORM idempotency_internal.set_result(scope, 'n', '');
	END IF;
	RETURN QUERY SELECT f.name FROM unnest(fresh) AS f (name) ORDER BY f.name COLLATE "C";
END
$$;
COMMENT ON FUNCTION idempotency.once_many(text, anycompatiblearray, interval) IS
	'record many messages; returns those recorded for the first time';

-- ---------------------------------------------------------------------------
-- Reading and deleting a stored key
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.peek(scope text, key text)
	RETURNS idempotency.operation
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	stored idempotency.key;
BEGIN
	IF NOT idempotency_internal.names_are_valid(scope, key) THEN
		PERFORM idempotency_internal.check_names(scope, key);
	END IF;
	-- a fixed snapshot can show a removed row beside that of this transaction
	SELECT * INTO stored FROM idempotency.key AS k
	WHERE k.scope = peek.scope COLLATE "C" AND k.key = peek.key COLLATE "C" AND k.expires_at > clock_timestamp()
	ORDER BY pg_current_xact_id_if_assigned() IN (k.claimed_in, k.proven_in) DESC NULLS LAST -- not distributed
	LIMIT 1;
	IF NOT FOUND THEN
		RETURN NULL;
	ELSIF stored.token IS NULL THEN
		RETURN idempotency_internal.replayed(stored.status, stored.headers, stored.response, stored.expires_at, stored.fingerprint);
	END IF;
	RETURN idempotency_internal.in_progress(stored, stored.fingerprint, NULL);
END
$$;
COMMENT ON FUNCTION idempotency.peek(text, text) IS
	'read a stored outcome; NULL if there is none';

CREATE FUNCTION idempotency.forget(scope text, key text)
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	stored idempotency.key;
	written boolean;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('forget');
	ELSIF NOT idempotency_internal.names_are_valid(scope, key) THEN
		PERFORM idempotency_internal.check_names(scope, key);
	END IF;
	stored := idempotency_internal.lock_row(scope, key, NULL);
	IF stored.scope IS NULL THEN
		-- An open claim of another transaction is invisible: insert a row, which waits for it.
		-- That the lock of the key is free proves nothing (see announce()).
		written := idempotency_internal.put_within(
			idempotency_internal.granted_row(NULL, scope, key, NULL, NULL, NULL, interval '-1 s', true), NULL, NULL,
			idempotency_internal.milliseconds(idempotency_internal.default_wait(scope)));
		IF written IS NULL THEN
			PERFORM idempotency_internal.raise_in_progress(scope, key);
		ELSIF written THEN
			-- a row that only the snapshot shows stays
			DELETE FROM idempotency.key AS k
			WHERE k.scope = forget.scope COLLATE "C" AND k.key = forget.key COLLATE "C" AND k.claimed_in = pg_current_xact_id();
			RETURN false;
		END IF;
		stored := idempotency_internal.lock_row(scope, key, NULL);
	END IF;
	IF stored.claim_retention IS NOT NULL OR stored.token IS NOT NULL THEN
		PERFORM FROM idempotency.key AS k
		WHERE k.scope = forget.scope COLLATE "C" AND k.key = forget.key COLLATE "C"
			AND pg_current_xact_id_if_assigned() IN (k.claimed_in, k.proven_in) AND idempotency_internal.is_written_here(k.xmin);
		IF FOUND THEN
			PERFORM idempotency_internal.raise_claimed_here(scope, key);
		END IF;
	END IF;
	PERFORM idempotency_internal.outlive(coalesce(stored.token, stored.finished_by));
	DELETE FROM idempotency.key AS k WHERE k.scope = forget.scope COLLATE "C" AND k.key = forget.key COLLATE "C";
	RAISE LOG 'idempotency.forget() by role "%": scope "%", key "%"',
		coalesce(nullif(current_setting('role'), 'none'), session_user), scope, key;
	PERFORM idempotency_internal.set_result(scope, 'n', '');
	RETURN stored.expires_at > clock_timestamp();
END
$$;
COMMENT ON FUNCTION idempotency.forget(text, text) IS
	'delete a stored outcome; true if there was one';

-- Deletes expired rows in "pages" blocks from "first" on, max_rows at most.  It waits for no row: one that another
-- transaction has locked is left for a later call.  "next" is the block after those that it has read, is_old
-- tells whether most of their rows had expired, and is_young whether few had.
CREATE FUNCTION idempotency_internal.reap_stretch(first bigint, pages bigint, max_rows bigint,
	OUT next bigint, OUT reaped bigint, OUT is_old boolean, OUT is_young boolean)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
	SET enable_tidscan = on SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	first_row CONSTANT tid := format('(%s,0)', first);
	next_row CONSTANT tid := format('(%s,0)', first + pages);
	-- after a row with a token of this unit, the next token of its key might not be greater
	least_token CONSTANT bigint := idempotency_internal.token_time() << 17;
	kept bigint;
	expired bigint;
	first_expired tid;
BEGIN
	DELETE FROM idempotency.key AS k
	WHERE k.ctid = ANY (ARRAY(
		SELECT e.ctid
		FROM idempotency.key AS e
		WHERE e.ctid >= first_row AND e.ctid < next_row AND e.expires_at <= statement_timestamp()
			AND (coalesce(e.token, e.finished_by) >= least_token) IS NOT TRUE
			AND (pg_current_xact_id_if_assigned() IN (e.claimed_in, e.proven_in)
				AND (e.claim_retention IS NOT NULL OR e.token IS NOT NULL) AND idempotency_internal.is_written_here(e.xmin)) IS NOT TRUE
		LIMIT max_rows
		FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS reaped = ROW_COUNT;
	next := first + pages;
	is_old := false;
	is_young := true;
	IF reaped > 0 THEN
		SELECT count(*), count(*) FILTER (WHERE e.expires_at <= statement_timestamp()), min(e.ctid) FILTER (WHERE e.expires_at <= statement_timestamp())
		INTO kept, expired, first_expired
		FROM idempotency.key AS e
		WHERE e.ctid >= first_row AND e.ctid < next_row;
		is_young := 8 * reaped < reaped + kept;
		IF reaped < max_rows THEN
			is_old := 4 * reaped >= 3 * (reaped + kept);
		ELSE
			is_old := 4 * (reaped + expired) >= 3 * (reaped + kept);
			next := coalesce((first_expired::text::point)[0], next);
		END IF;
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.reap_stretch(bigint, bigint, bigint) IS 'delete the expired rows of some blocks, without waiting';

-- Deletes expired keys as the extension's worker does: first where the border between expired and
-- live rows was, then in a part of the table that is another one in each call.  With "whole", it reads
-- the whole table.  Both positions are only hints: any are right, in every table.  They are
-- sequences, because a row would make two reapers wait for each other.
CREATE FUNCTION idempotency_internal.reap_keys(max_rows bigint, whole boolean)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	stretch CONSTANT integer := 64;
	blocks bigint := pg_relation_size('idempotency.key') / current_setting('block_size')::integer;
	border_before CONSTANT bigint := coalesce(pg_sequence_last_value('idempotency_internal.expiry_block'), 0);
	scan_before CONSTANT bigint := coalesce(pg_sequence_last_value('idempotency_internal.scan_block'), 0);
	border bigint := border_before;
	scan bigint := scan_before;
	scanned bigint := 0;
	young_left bigint := least(greatest(blocks / 256, 256), 4096);
	reaped bigint := 0;
	part record;
BEGIN
	WHILE reaped < max_rows AND blocks > 0 LOOP
		border := CASE WHEN border < blocks THEN border ELSE 0 END;
		part := idempotency_internal.reap_stretch(border, least(stretch, blocks - border), max_rows - reaped);
		reaped := reaped + part.reaped;
		EXIT WHEN NOT part.is_old;
		border := part.next;
	END LOOP;
	WHILE reaped < max_rows AND scanned < blocks AND (whole OR young_left > 0) LOOP
		scan := CASE WHEN scan < blocks THEN scan ELSE 0 END;
		part := idempotency_internal.reap_stretch(scan, least(stretch, blocks - scan, blocks - scanned), max_rows - reaped);
		reaped := reaped + part.reaped;
		scanned := scanned + part.next - scan;
		IF part.is_young THEN
			young_left := young_left - (part.next - scan);
		END IF;
		IF part.is_old THEN
			border := part.next;
		END IF;
		scan := part.next;
	END LOOP;
	IF border <> border_before THEN
		PERFORM setval('idempotency_internal.expiry_block', border);
	END IF;
	IF scan <> scan_before THEN
		PERFORM setval('idempotency_internal.scan_block', scan);
	END IF;
	RETURN reaped;
END
$$;
COMMENT ON FUNCTION idempotency_internal.reap_keys(bigint, boolean) IS 'delete expired keys at the border and in a part of the table';

-- Events are half of the rows at most, unless there are too few keys, so that neither keeps the other from
-- being deleted.
CREATE FUNCTION idempotency.reap(max_rows integer DEFAULT 1000)
	RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	most CONSTANT bigint := coalesce(max_rows, 9223372036854775807);
	reaped bigint := 0;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('reap');
	ELSIF max_rows < 0 THEN
		PERFORM idempotency_internal.raise('22023', 'max_rows must not be negative', NULL,
			'Pass NULL for as many as one transaction may.');
	END IF;
	reaped := idempotency_internal.reap_events(most / 2); -- not distributed
	reaped := reaped + idempotency_internal.reap_keys(most - reaped, max_rows IS NULL);
	-- not distributed:
	IF reaped < most AND reaped >= most / 2 THEN
		reaped := reaped + idempotency_internal.reap_events(most - reaped);
	END IF;
	-- both layouts
	RETURN reaped;
END
$$;
COMMENT ON FUNCTION idempotency.reap(integer) IS
	'delete expired rows, and events that every subscription has passed, in this transaction; returns their number';

-- ---------------------------------------------------------------------------
-- Settings that configure() stores
-- ---------------------------------------------------------------------------

-- Blanks mean that no error is final.  Transient failures are refused, because a retry can succeed.
CREATE FUNCTION idempotency_internal.check_final_errors(value text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	code text;
BEGIN
	FOREACH code IN ARRAY regexp_split_to_array(btrim(value), ' *, *') LOOP
		IF code !~ E'^([0-9A-Z]{5})\x3F$' OR code ~ '^(00|08|25|40|53|55|57|58|72|F0|HV|IK|XX)' AND code <> 'IKFIN' THEN
			PERFORM idempotency_internal.raise_setting('final_errors', value,
				format(CASE
					WHEN code ~ '^[0-9A-Z]{5}$' THEN '"%s" is a transient failure, which cannot be final.'
					ELSE '"%s" is not an SQLSTATE of five digits and capital letters.'
				END, code),
				'Use a list such as ''IKFIN, 23514''.');
		END IF;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_final_errors(text) IS 'raise 22023 unless a text is a value of idempotency.final_errors';

CREATE FUNCTION idempotency_internal.check_setting(name text, value text)
	RETURNS void
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE
AS $$
DECLARE
	wait interval := CASE name WHEN 'wait' THEN idempotency_internal.duration(value, 'ms') END;
BEGIN
	PERFORM idempotency_internal.retention_setting(name, value, CASE name WHEN 'retention' THEN 1 ELSE 0 END)
		WHERE name IN ('retention', 'outbox_retention');
	PERFORM idempotency_internal.size_setting(name, value) WHERE name IN ('max_response_size', 'max_payload_size');
	PERFORM idempotency_internal.check_final_errors(value) WHERE name = 'final_errors';
	IF name = 'wait' AND (wait BETWEEN interval '0' AND interval '24 days') IS NOT TRUE THEN
		PERFORM idempotency_internal.raise_setting(name, value,
			CASE WHEN wait IS NULL THEN 'It is not an interval.' ELSE 'It must be from 0 to 2073600000 milliseconds.' END,
			'Use an interval such as ''30 days'' or ''90 minutes'', or a number of milliseconds.');
	ELSIF name = 'documentation' AND idempotency_internal.uri_reference(value) <> value THEN
		PERFORM idempotency_internal.raise_setting(name, value, 'It must be a URI reference (RFC 3986) of at most 2000 bytes.',
			'Escape other characters, such as %20 for a space.');
	END IF;
END
$$;
COMMENT ON FUNCTION idempotency_internal.check_setting(text, text) IS 'raise 22023 unless a setting can have a value';

-- Writes configured() and configured_retention() again.  A function in SQL's own syntax has no
-- name that a search path could change.
CREATE FUNCTION idempotency_internal.write_settings()
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	settings text;
	retentions text;
BEGIN
	SELECT string_agg(format('WHEN name = %L AND scope COLLATE "C" LIKE %L THEN %L', s.name, p.pattern, s.value), ' ' ORDER BY s.literals DESC, s.scope),
		string_agg(format('WHEN scope COLLATE "C" LIKE %L THEN interval %L', p.pattern, idempotency_internal.duration(s.value, 's')), ' '
			ORDER BY s.literals DESC, s.scope) FILTER (WHERE s.name = 'retention')
	INTO settings, retentions
	FROM idempotency.configuration AS s, idempotency_internal.like_pattern(s.scope) AS p (pattern);
	EXECUTE format('CREATE OR REPLACE FUNCTION idempotency_internal.configured(name text, scope text) RETURNS text '
		'LANGUAGE sql STABLE PARALLEL SAFE RETURN %s', coalesce('CASE ' || settings || ' END', 'NULL::text'));
	EXECUTE format('CREATE OR REPLACE FUNCTION idempotency_internal.configured_retention(scope text) RETURNS interval '
		'LANGUAGE sql STABLE PARALLEL SAFE RETURN %s', coalesce('CASE ' || retentions || ' ELSE interval ''24:00:00'' END', 'interval ''24:00:00'''));
END
$$;
COMMENT ON FUNCTION idempotency_internal.write_settings() IS 'replace the functions that have the stored settings';

-- ---------------------------------------------------------------------------
-- run: claim, call the handler, complete or replay
-- ---------------------------------------------------------------------------

-- Runs with the rights and the search path of its caller, because the handler does; so
-- every name is qualified.
CREATE FUNCTION idempotency.run(
	scope text, key text, request anycompatible, handler regprocedure,
	wait interval DEFAULT NULL, retention interval DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	final_codes pg_catalog.text[] := pg_catalog.regexp_split_to_array(pg_catalog.btrim(idempotency.setting('final_errors')), ' *, *');
	document pg_catalog.json;
	routine pg_catalog.record;
	operation idempotency.operation;
	stored idempotency.operation;
	response pg_catalog.json;
	message pg_catalog.text;
	detail pg_catalog.text;
BEGIN
	-- Check the handler
	IF handler IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'handler is missing', HINT = 'Pass a function as regprocedure.';
	ELSIF pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on' THEN
		RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = 'cannot execute idempotency.run() in a read-only transaction';
	END IF;
	SELECT p.proisstrict AS is_strict, n.nspname AS schema_name, p.proname AS function_name, p.proargtypes[0]::pg_catalog.regtype AS argument,
		p.prokind OPERATOR(pg_catalog.=) 'f' AND NOT p.proretset AND p.pronargs OPERATOR(pg_catalog.=) 1
			AND p.proargtypes[0] OPERATOR(pg_catalog.=) ANY (ARRAY['pg_catalog.json', 'idempotency.document']::pg_catalog.regtype[]::pg_catalog.oid[])
			AND p.prorettype OPERATOR(pg_catalog.=) ANY (ARRAY['pg_catalog.json', 'idempotency.document']::pg_catalog.regtype[]::pg_catalog.oid[]) AS fits
	INTO routine
	FROM pg_catalog.pg_proc AS p
	JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
	WHERE p.oid OPERATOR(pg_catalog.=) handler;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = '42883',
			MESSAGE = pg_catalog.format('handler with OID %s does not exist', handler::pg_catalog.oid),
			HINT = 'Pass a function as regprocedure.';
	ELSIF NOT routine.fits THEN
		RAISE EXCEPTION USING ERRCODE = '42P13',
			MESSAGE = pg_catalog.format('function %s cannot be a handler', handler),
			HINT = 'A handler takes one argument of type idempotency.document (or json) and returns json.';
	ELSIF routine.is_strict AND request IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'request is missing, and the handler is strict',
			HINT = 'Pass a request, or declare the handler CALLED ON NULL INPUT.';
	ELSIF NOT pg_catalog.has_function_privilege(handler, 'EXECUTE') THEN
		RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = pg_catalog.format('permission denied for function %s', routine.function_name);
	END IF;

	-- Claim or replay
	operation := idempotency.claim(scope, key, request, wait => wait, retention => retention);
	IF operation.replayed THEN
		RETURN operation;
	END IF;
	document := request::pg_catalog.text;

	-- Call the handler, and store its outcome
	BEGIN
		EXECUTE pg_catalog.format('SELECT %I.%I($1::%s)', routine.schema_name, routine.function_name, routine.argument) INTO response USING document;
	EXCEPTION
		WHEN OTHERS THEN
			IF SQLSTATE OPERATOR(pg_catalog.<>) ALL (final_codes) THEN
				RAISE;
			END IF;
			GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
	END;
	IF message IS NULL THEN
		PERFORM idempotency.complete(scope, key, response);
	ELSE
		PERFORM idempotency.fail(scope, key,
			pg_catalog.concat('{"type":"about:blank","title":', pg_catalog.to_json(message), E',"status"\x3A422',
				CASE WHEN detail OPERATOR(pg_catalog.<>) '' THEN ',"detail":' OPERATOR(pg_catalog.||) pg_catalog.to_json(detail)::pg_catalog.text END, '}'),
			422, '{"Content-Type": "application/problem+json"}'::pg_catalog.text);
	END IF;

	stored := idempotency.peek(scope, key);
	operation.status := stored.status;
	operation.headers := stored.headers;
	operation.response := stored.response;
	operation.failed := stored.failed;
	operation.expires_at := stored.expires_at;
	RETURN operation;
END
$$;
COMMENT ON FUNCTION idempotency.run(text, text, anycompatible, regprocedure, interval, interval) IS
	'claim, call the handler, and complete; or replay';

-- ---------------------------------------------------------------------------
-- The guard: refuses writes from a transaction without a claim
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency.require_claim()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	pattern text := coalesce(tg_argv[0], '*');
	like_pattern text := idempotency_internal.like_pattern(pattern);
	result text;
	asked boolean := false;
BEGIN
	IF tg_when = 'INSTEAD OF' THEN
		PERFORM idempotency_internal.raise('39P01',
			format('idempotency.require_claim() was called INSTEAD OF a write to view "%s.%s"', tg_table_schema, tg_table_name),
			'The write would be lost silently.',
			'Create the trigger BEFORE or AFTER the write, on the table behind the view.');
	ELSIF tg_nargs > 1 THEN
		PERFORM idempotency_internal.raise('39P01', 'idempotency.require_claim() takes one argument at most', NULL,
			'Pass a pattern of scopes.');
	END IF;
	PERFORM idempotency_internal.check_pattern(pattern);

	FOREACH result IN ARRAY string_to_array(substr(idempotency_internal.results(), 2), chr(30)) LOOP
		IF split_part(result, chr(31), 1) LIKE like_pattern THEN
			IF idempotency_internal.is_granted(split_part(result, chr(31), 1),
				left(split_part(result, chr(31), 2), 1), substr(split_part(result, chr(31), 2), 2)) THEN
				RETURN CASE WHEN tg_op = 'DELETE' THEN old ELSE new END;
			END IF;
			asked := true;
			EXIT;
		END IF;
	END LOOP;
	PERFORM idempotency_internal.raise('IK403',
		format('write to table "%s.%s" without a claim', tg_table_schema, tg_table_name),
		CASE
			WHEN asked THEN format('The last claim of this transaction in scope "%s" was not granted, or was released or forgotten.', pattern)
			ELSE format('This transaction has claimed no key in scope "%s".', pattern)
		END,
		'Call idempotency.claim() first, and write only if it did not replay.');
END
$$;
COMMENT ON FUNCTION idempotency.require_claim() IS
	'trigger: refuse a write from a transaction without a claim in the scope';

-- The trigger of open claims runs now: its events are done with only if no claim is open.  Those
-- of leases must stay, because a later call can fail; they know which lease it is.
CREATE FUNCTION idempotency.check_commit()
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	-- not distributed:
	IF idempotency_internal.is_unproven() THEN
		SET CONSTRAINTS idempotency.require_proof IMMEDIATE;
		PERFORM idempotency_internal.raise_unproven(NULL);
	END IF;
	SET CONSTRAINTS idempotency.require_outcome IMMEDIATE;
	SET CONSTRAINTS idempotency.require_outcome DEFERRED;
	-- both layouts
	-- distributed: IF to_regclass('idempotency_internal.open_claim') IS NOT NULL THEN
	-- distributed: SET CONSTRAINTS idempotency_internal.require_outcome IMMEDIATE;
	-- distributed: SET CONSTRAINTS idempotency_internal.require_outcome DEFERRED;
	-- distributed: END IF;
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency.check_commit() IS
	'raise what COMMIT would raise now; true if nothing';

CREATE FUNCTION idempotency.current_key(scope text)
	RETURNS text
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	results text := idempotency_internal.results();
	start integer;
	key text;
BEGIN
	IF NOT idempotency_internal.names_are_valid(scope, scope) THEN
		PERFORM idempotency_internal.check_scope(scope);
	END IF;
	start := strpos(results, chr(30) || scope || chr(31) || 'k');
	IF start = 0 THEN
		RETURN NULL;
	END IF;
	key := split_part(substr(results, start + length(scope) + 3), chr(30), 1);
	RETURN CASE WHEN idempotency_internal.is_granted(scope, 'k', key) THEN key END;
END
$$;
COMMENT ON FUNCTION idempotency.current_key(text) IS
	'the key that this transaction claimed last in the scope';

-- ---------------------------------------------------------------------------
-- JSON of other types
-- ---------------------------------------------------------------------------

-- Each function that takes JSON has a form for text, json and jsonb; those of claim() and
-- try_claim() are above.  A request is never printed, an answer never parsed.  So the parser converts an argument of a client's own type
-- in the query of the client and with its rights, or refuses it.  A polymorphic parameter would
-- bring that type into a function with the rights of the owner, where the client's casts and
-- domain constraints would run: PL/pgSQL checks a domain over a composite type at the entry.
DO $$
DECLARE
	form record;
BEGIN
	FOR form IN
		SELECT p.proname AS name, t.type, p.provolatile, p.proparallel, p.proisstrict, pg_get_function_result(p.oid) AS result,
			regexp_replace(regexp_replace(pg_get_function_arguments(p.oid),
				E'\\m(document|body|response|state) (text|jsonb)( DEFAULT NULL::text)\x3F', '\1 ' || t.type),
				'\mheaders text DEFAULT NULL::text', 'headers ' || t.type || ' DEFAULT NULL') AS arguments,
			(SELECT string_agg('$' || a.ordinality || CASE WHEN a.name IN ('document', 'body', 'response', 'state', 'headers') THEN '::' || f.type ELSE '' END,
				', ' ORDER BY a.ordinality)
				FROM unnest(p.proargnames) WITH ORDINALITY AS a (name)) AS passed,
			obj_description(p.oid, 'pg_proc') AS comment
		FROM (VALUES ('canonical', 'jsonb'), ('fingerprint', 'jsonb'), ('complete', 'text'), ('fail', 'text'), ('checkpoint', 'text')) AS f (name, type),
			unnest('{text,json,jsonb}'::text[]) AS t (type), pg_proc AS p
		WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname = f.name AND t.type <> f.type
	LOOP
		EXECUTE format('CREATE FUNCTION idempotency.%I(%s) RETURNS %s LANGUAGE sql %s PARALLEL %s %s RETURN idempotency.%1$I(%7$s)',
			form.name, form.arguments, form.result,
			CASE form.provolatile WHEN 'i' THEN 'IMMUTABLE' ELSE 'VOLATILE' END,
			CASE form.proparallel WHEN 's' THEN 'SAFE' ELSE 'UNSAFE' END,
			CASE WHEN form.proisstrict THEN 'STRICT' ELSE '' END, form.passed);
		EXECUTE format('COMMENT ON FUNCTION idempotency.%I(%s) IS %L', form.name,
			regexp_replace(form.arguments, ' DEFAULT [^,]*', '', 'g'), form.comment);
	END LOOP;
END
$$;

-- ---------------------------------------------------------------------------
-- Keys of other types than text
-- ---------------------------------------------------------------------------

-- Implicit casts to the type of a parameter need a base type, which takes a superuser.
-- Instead, each form of a function that takes a key has one more for uuid, and one for bigint.
DO $$
DECLARE
	form record;
BEGIN
	FOR form IN
		SELECT p.oid::regprocedure AS function, p.proname AS name, t.type, p.provolatile, p.proparallel, p.proisstrict,
			replace(pg_get_function_arguments(p.oid), 'key text', 'key ' || t.type) AS arguments,
			replace(pg_get_function_identity_arguments(p.oid), 'key text', 'key ' || t.type) AS identity,
			pg_get_function_result(p.oid) AS result,
			obj_description(p.oid, 'pg_proc') AS comment,
			(SELECT string_agg(CASE WHEN a.name = 'key' THEN '$' || a.ordinality || '::pg_catalog.text' ELSE '$' || a.ordinality END,
				', ' ORDER BY a.ordinality)
				FROM unnest(p.proargnames) WITH ORDINALITY AS a (name)) AS passed
		FROM pg_proc AS p, unnest('{uuid,bigint}'::text[]) AS t (type)
		WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proargnames[2] = 'key'
	LOOP
		EXECUTE format('CREATE FUNCTION idempotency.%I(%s) RETURNS %s LANGUAGE sql %s PARALLEL %s %s AS %L',
			form.name, form.arguments, form.result,
			CASE form.provolatile WHEN 'i' THEN 'IMMUTABLE' WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END,
			CASE form.proparallel WHEN 's' THEN 'SAFE' ELSE 'UNSAFE' END,
			CASE WHEN form.proisstrict THEN 'STRICT' ELSE '' END,
			format('SELECT idempotency.%I(%s)', form.name, form.passed));
		EXECUTE format('COMMENT ON FUNCTION idempotency.%I(%s) IS %L', form.name, form.identity, form.comment);
	END LOOP;
END
$$;

-- delivery/assemble: begin

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
	IF EXISTS (SELECT FROM pg_settings AS g WHERE g.name = 'idempotency.retention' AND g.short_desc IS NOT NULL) THEN
		RAISE WARNING 'the settings of the library idempotency precede those of idempotency.configure()' USING
			HINT = 'Remove the library from shared_preload_libraries, session_preload_libraries and local_preload_libraries.';
	END IF;
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
	PERFORM idempotency_internal.write_settings();
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
	PERFORM idempotency_internal.check_prefix(scope, scope) WHERE scope IS NOT NULL;
	value := idempotency_internal.setting(name, coalesce(scope, ''));
	IF value = '' THEN
		RETURN idempotency_internal.default_setting(name);
	END IF;
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

-- A transaction that inserts a key has its advisory lock, and the row of a stored key the ID of the
-- transaction that locked it.  All others wait for the ID of one of these.
CREATE FUNCTION idempotency_internal.key_locks(scope text, key text, all_keys boolean)
	RETURNS TABLE (pid integer, virtual_transaction text, is_granted boolean, wait_start timestamptz)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
#variable_conflict use_column
DECLARE
	number bigint;
BEGIN
	IF NOT all_keys THEN
		IF NOT idempotency_internal.names_are_valid(scope, key) THEN
			PERFORM idempotency_internal.check_names(scope, key);
		END IF;
		number := idempotency_internal.lock_number(scope, key);
	END IF;
	RETURN QUERY
	WITH lock AS MATERIALIZED (
		SELECT l.* FROM pg_locks AS l
		WHERE l.database IS NULL OR l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
	), owner AS (
		SELECT DISTINCT l.pid, l.virtualtransaction FROM lock AS l
		WHERE l.granted AND CASE
			WHEN all_keys THEN l.relation = 'idempotency.key'::regclass AND l.mode IN ('RowShareLock', 'RowExclusiveLock')
			WHEN l.locktype = 'advisory' THEN l.objsubid = 1 AND l.classid::bigint << 32 | l.objid::bigint = number
			ELSE l.transactionid = (SELECT k.xmax FROM idempotency.key AS k
				WHERE k.scope = key_locks.scope COLLATE "C" AND k.key = key_locks.key COLLATE "C")
		END
	), waiter AS (
		SELECT l.pid, l.virtualtransaction, l.waitstart FROM lock AS l
		WHERE NOT l.granted AND l.transactionid IN (
			SELECT x.transactionid FROM lock AS x JOIN owner AS o ON o.virtualtransaction = x.virtualtransaction WHERE x.granted)
	)
	SELECT o.pid, o.virtualtransaction, true, NULL::timestamptz FROM owner AS o
	WHERE NOT EXISTS (SELECT FROM waiter AS w WHERE w.virtualtransaction = o.virtualtransaction)
	UNION ALL
	SELECT w.pid, w.virtualtransaction, false, w.waitstart FROM waiter AS w;
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

CREATE FUNCTION idempotency.holders(scope text, key text)
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
	SELECT * FROM idempotency_internal.holders_of($1::text, $2::text, false)
$$;
COMMENT ON FUNCTION idempotency.holders(text, text) IS
	'the transaction that holds a key, and those that wait for it';

-- ---------------------------------------------------------------------------
-- Publishing (the extension has a function in C instead)
-- ---------------------------------------------------------------------------

-- The headers of an event: those of the caller, with scope and key of the claim that this
-- transaction was granted last, in any scope whose latest call it was.  Text is joined, so that the
-- caller's bytes stay as they are.
CREATE FUNCTION idempotency_internal.event_headers(given json)
	RETURNS json
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	last text := (
		SELECT e.entry FROM unnest(string_to_array(idempotency_internal.results(), chr(30))) WITH ORDINALITY AS e (entry, n)
		WHERE left(split_part(e.entry, chr(31), 2), 1) = 'k' ORDER BY e.n LIMIT 1);
	scope text := split_part(last, chr(31), 1);
	key text := substr(split_part(last, chr(31), 2), 2);
	members text;
BEGIN
	IF json_typeof(given) <> 'object' THEN
		PERFORM idempotency_internal.raise('22023', 'headers must be a JSON object', NULL,
			'Pass names and values, such as ''{"trace": "a1"}''.');
	ELSIF last IS NULL OR NOT idempotency_internal.is_granted(scope, 'k', key) THEN
		RETURN given;
	END IF;
	members := concat_ws(',',
		CASE WHEN given -> 'idempotency-scope' IS NULL THEN '"idempotency-scope":' || to_json(scope) END,
		CASE WHEN given -> 'idempotency-key' IS NULL THEN '"idempotency-key":' || to_json(key) END,
		nullif(regexp_replace(given::text, E'^[ \\t\\r\\n]*\\{[ \\t\\r\\n]*|[ \\t\\r\\n]*\\}[ \\t\\r\\n]*$', '', 'g'), ''));
	RETURN '{' || members || '}';
END
$$;
COMMENT ON FUNCTION idempotency_internal.event_headers(json) IS 'the headers of an event that is published now';

-- The transaction has its id before the number is drawn, and the INSERT locks the table
-- before that, too: see scan.sql.
CREATE FUNCTION idempotency.publish(
	topic text, payload text, aggregate_id text DEFAULT NULL, type text DEFAULT NULL,
	headers text DEFAULT NULL, event_id uuid DEFAULT NULL, deliver_at timestamptz DEFAULT NULL)
	RETURNS uuid
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	now timestamptz := clock_timestamp();
	document json := payload;
	given json := headers;
	bytes integer := coalesce(octet_length(payload), 0);
	microseconds bigint;
	me xid8;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM idempotency_internal.raise_read_only('publish');
	END IF;
	IF (topic <> '' AND length(topic) <= 255 AND (aggregate_id <> '' AND length(aggregate_id) <= 255) IS NOT FALSE
		AND (type <> '' AND length(type) <= 255) IS NOT FALSE
		AND concat(topic, aggregate_id, type) !~ E'[\\u0001-\\u001F\\u007F-\\u009F{[]' COLLATE "C") IS NOT TRUE
	THEN
		PERFORM idempotency_internal.check_name('topic', topic);
		PERFORM idempotency_internal.check_name('aggregate', aggregate_id) WHERE aggregate_id IS NOT NULL;
		PERFORM idempotency_internal.check_name('type', type) WHERE type IS NOT NULL;
	END IF;
	IF given IS NOT NULL OR idempotency_internal.results() <> '' THEN
		given := idempotency_internal.event_headers(given);
		bytes := bytes + coalesce(octet_length(given::text), 0);
	END IF;
	-- the least limit, and the default one
	IF bytes > 1024 AND (bytes > 1048576 OR idempotency_internal.setting('max_payload_size') <> '')
		AND bytes > idempotency_internal.size_setting('max_payload_size', idempotency_internal.setting('max_payload_size')) THEN
		PERFORM idempotency_internal.raise('54000',
			format('event of %s bytes exceeds idempotency.max_payload_size (%s bytes)', bytes,
				idempotency_internal.size_setting('max_payload_size', idempotency_internal.setting('max_payload_size'))),
			format('Topic "%s".', topic), 'Publish a reference to the large part, or raise the limit with idempotency.configure().');
	END IF;
	-- A UUID of version 7, as of uuidv7()
	IF event_id IS NULL THEN
		microseconds := date_part('epoch', now) * 1000000;
		event_id := encode(overlay(uuid_send(gen_random_uuid())
			PLACING substr(int8send(microseconds / 1000), 3) || int2send((28672 + (microseconds % 1000 << 12) / 1000)::smallint) FROM 1), 'hex');
	END IF;
	me := pg_current_xact_id();
	INSERT INTO idempotency.outbox (seq, txid, published_at, id, bucket, bytes, deliver_at, aggregatetype, aggregateid, type, payload, headers)
	VALUES (nextval('idempotency.outbox_seq'), me, now, event_id,
		hashtext(coalesce(aggregate_id, event_id::text) COLLATE "C") & 2147483647, bytes, publish.deliver_at, topic, aggregate_id, publish.type, document, given);
	RETURN event_id;
END
$$;
COMMENT ON FUNCTION idempotency.publish(text, text, text, text, text, uuid, timestamptz) IS
	'publish an event when this transaction commits; returns the event''s id';

-- Payload and headers can be json or jsonb, and an aggregate can be named by uuid or bigint: one
-- more form for each, so that no value of a client's own type comes here.
DO $$
DECLARE
	form record;
BEGIN
	FOR form IN
		SELECT d.type AS document, a.type AS aggregate
		FROM unnest('{text,json,jsonb}'::text[]) AS d (type), unnest('{text,uuid,bigint}'::text[]) AS a (type)
		WHERE d.type <> 'text' OR a.type <> 'text'
	LOOP
		EXECUTE format('CREATE FUNCTION idempotency.publish(topic text, payload %1$s, aggregate_id %2$s%3$s, type text DEFAULT NULL, '
			'headers %1$s DEFAULT NULL, event_id uuid DEFAULT NULL, deliver_at timestamptz DEFAULT NULL) RETURNS uuid '
			'LANGUAGE sql VOLATILE PARALLEL UNSAFE AS %4$L',
			form.document, form.aggregate, CASE form.aggregate WHEN 'text' THEN ' DEFAULT NULL' ELSE '' END,
			'SELECT idempotency.publish($1, $2::pg_catalog.text, $3::pg_catalog.text, $4, $5::pg_catalog.text, $6, $7)');
		EXECUTE format('COMMENT ON FUNCTION idempotency.publish(text, %1$s, %2$s, text, %1$s, uuid, timestamptz) IS %3$L', form.document, form.aggregate,
			'publish an event when this transaction commits; returns the event''s id');
	END LOOP;
END
$$;

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
	IF p.size > 0 AND clock_timestamp() BETWEEN p.leased_at AND p.leased_until THEN
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
-- That is for UNLISTEN, which does nothing else.  A session that listens to another channel cannot
-- PREPARE TRANSACTION then.
CREATE FUNCTION idempotency_internal.caller()
	RETURNS name
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
BEGIN
	UNLISTEN idempotency_internal;
	RETURN CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role')::name END;
END
$$;
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
	IF changed.handler IS NOT NULL AND (new_handler IS NOT NULL OR new_owner IS NOT NULL) THEN
		PERFORM idempotency_internal.check_handler_owner(changed.handler, changed.owner);
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
	THEN
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
		now := clock_timestamp();
		lease_end := now + lease;
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
		PERFORM pg_sleep(least(pause, extract(epoch FROM deadline - clock_timestamp())::double precision));
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
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	RETURN set_config('idempotency_internal.results', '', true) IS NOT NULL;
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
			WHEN k.last_error IS NULL OR has_table_privilege('idempotency.dead_letters', 'SELECT')
			THEN k.last_error
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

-- A layout that distributes the keys over several servers has no outbox, because a position
-- compares transactions of one server: see citus.sql.
CREATE FUNCTION idempotency_internal.delivery_routines()
	RETURNS text[]
	LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT '{refuse_update,event_headers,publish,next_id,snapshot,has_published,is_foreign,open_transactions,
		raise_sequence,begin_window,begin_here,end_window,is_due,park_blocked,read_log,caller,log_call,clipped_error,
		subscription_of,raise_in_use,locked_subscription,patterns_of,create_partitions,create_partitions_now,
		handler_text,check_handler_owner,change,subscribe,alter_subscription,unsubscribe,raise_altered,put_position,
		schedule_queue,fail_event,take_parked,end_generation,next_batch,due_partitions,fetch,has_more,batch_of,ack_events,ack,nack,extend,pause,
		resume,number_before,move_subscription,seek,redrive_events,redrive,discard_events,discard,drop_lag,reap_events,handler_of,end_event,deliver}'::text[]
$$;
COMMENT ON FUNCTION idempotency_internal.delivery_routines() IS 'the names of the functions of the outbox';

-- delivery/assemble: end

-- The planner tests cheaper conditions before it calls a function that writes, and keeps the
-- rows of a function in a cache (Memoize) if it expects more than a few.
DO $$
DECLARE
	form regprocedure;
BEGIN
	FOR form IN
		SELECT p.oid FROM pg_proc AS p
		WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname = ANY ('{claim,try_claim,complete,fail,release,renew,checkpoint,
			claim_abandoned,run,forget,once,once_many,reap,publish,subscribe,unsubscribe,fetch,ack,nack,extend,redrive}'::text[])
	LOOP
		EXECUTE format('ALTER FUNCTION %s COST 10000 %s', form,
			(SELECT 'ROWS 2' FROM pg_proc AS p WHERE p.oid = form AND p.proname = 'once_many'));
	END LOOP;
END
$$;

-- ---------------------------------------------------------------------------
-- Privileges: none for PUBLIC
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency_internal.grant_privileges(role regrole, functions text[], VARIADIC privileges text[] DEFAULT '{}')
	RETURNS boolean
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	granted text;
BEGIN
	IF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = role) THEN
		PERFORM idempotency_internal.raise('42704', format('role with OID %s does not exist', role::oid), NULL,
			'Pass the name of a role.');
	END IF;
	-- A restore without privileges (pg_restore --no-privileges) lets PUBLIC execute every function
	IF EXISTS (SELECT FROM pg_proc AS p
			WHERE p.proacl IS NULL AND p.pronamespace IN ('idempotency'::regnamespace, 'idempotency_internal'::regnamespace)) THEN
		REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA idempotency, idempotency_internal FROM PUBLIC;
	END IF;
	FOREACH granted IN ARRAY ARRAY['USAGE ON SCHEMA idempotency',
		'USAGE ON TYPE idempotency.identifier, idempotency.document, idempotency.keytext, idempotency.outcome, idempotency.operation, idempotency.abandoned']
		|| ARRAY(SELECT format('EXECUTE ON ROUTINE %s', p.oid::regprocedure) FROM pg_proc AS p
			WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname = ANY (functions))
		|| privileges
	LOOP
		EXECUTE format('GRANT %s TO %s', granted, role);
	END LOOP;
	RETURN true;
END
$$;
COMMENT ON FUNCTION idempotency_internal.grant_privileges(regrole, text[], text[]) IS
	'grant functions, by name, and other privileges to a role';

CREATE FUNCTION idempotency.grant_client(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'{claim,try_claim,complete,fail,release,renew,checkpoint,claim_abandoned,run,peek,current_key,
			require_claim,check_commit,publish,once,once_many,canonical,fingerprint,derive_key,natural_key,stable_text,uuidv7,parse_header,problem,
			problem_headers,setting}')
$$;
COMMENT ON FUNCTION idempotency.grant_client(regrole) IS
	'let a role claim, complete and replay; true';

CREATE FUNCTION idempotency.grant_consumer(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role,
		'{subscribe,alter_subscription,unsubscribe,pause,resume,seek,fetch,has_more,ack,nack,extend,deliver,handler_of,end_event,redrive,discard,once,once_many,setting}',
		'USAGE ON TYPE idempotency.event')
$$;
COMMENT ON FUNCTION idempotency.grant_consumer(regrole) IS
	'let a role subscribe to events and read them; true';

CREATE FUNCTION idempotency.grant_operator(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role, '{peek,forget,holders,reap,redrive,discard,pause,resume,seek,setting}',
		'USAGE ON TYPE idempotency.holder',
		'SELECT ON idempotency.settings, idempotency.keys, idempotency.zombies, idempotency.subscriptions, idempotency.partitions, idempotency.dead_letters')
$$;
COMMENT ON FUNCTION idempotency.grant_operator(regrole) IS
	'let a role read stored keys and delete them; true';

-- What pg_dump needs: it locks and copies each table, and reads each sequence, in both
-- schemas.
CREATE FUNCTION idempotency.grant_backup(role regrole)
	RETURNS boolean
	LANGUAGE sql VOLATILE PARALLEL UNSAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
	SELECT idempotency_internal.grant_privileges(role, '{}', 'USAGE ON SCHEMA idempotency_internal',
		'SELECT ON ALL TABLES IN SCHEMA idempotency, idempotency_internal',
		'SELECT ON ALL SEQUENCES IN SCHEMA idempotency, idempotency_internal')
$$;
COMMENT ON FUNCTION idempotency.grant_backup(regrole) IS
	'let a role dump the database, with all keys and responses; true';

-- Default privileges apply to each object above.  Revoke them all; only the owner keeps
-- privileges.
DO $$
DECLARE
	granted record;
BEGIN
	FOR granted IN
		SELECT DISTINCT o.kind, o.name, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
		FROM (
			SELECT 'SCHEMA' AS kind, n.oid::regnamespace::text AS name, n.oid AS schema, n.nspowner AS owner,
				coalesce(n.nspacl, acldefault('n', n.nspowner)) AS acl
			FROM pg_namespace AS n
			UNION ALL
			SELECT 'TABLE', c.oid::regclass::text, c.relnamespace, c.relowner, c.relacl
			FROM pg_class AS c
			UNION ALL
			SELECT 'ROUTINE', p.oid::regprocedure::text, p.pronamespace, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
			FROM pg_proc AS p
			UNION ALL
			SELECT 'TYPE', t.oid::regtype::text, t.typnamespace, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
			FROM pg_type AS t
			LEFT JOIN pg_class AS c ON c.oid = t.typrelid
			WHERE t.typcategory <> 'A' AND (c.oid IS NULL OR c.relkind = 'c')
		) AS o
		CROSS JOIN LATERAL aclexplode(o.acl) AS a
		WHERE o.schema IN ('idempotency'::regnamespace, 'idempotency_internal'::regnamespace) AND a.grantee <> o.owner
	LOOP
		EXECUTE format('REVOKE ALL ON %s %s FROM %s CASCADE', granted.kind, granted.name, granted.grantee);
	END LOOP;
END
$$;

-- Monitoring roles see the progress of subscriptions and the sessions that hold keys, but no
-- keys, no events and no error texts.
GRANT USAGE ON SCHEMA idempotency TO pg_monitor;
GRANT SELECT ON idempotency.subscriptions, idempotency.partitions TO pg_monitor;
GRANT EXECUTE ON FUNCTION idempotency.holders() TO pg_monitor;

$idempotency$;
EXCEPTION
	-- The context of the error is the whole script
	WHEN OTHERS OR query_canceled THEN
		GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
		RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = SQLERRM,
			DETAIL = pg_catalog.concat_ws(' ', 'Nothing was installed.', CASE WHEN detail OPERATOR(pg_catalog.<>) '' THEN detail END),
			HINT = CASE WHEN hint OPERATOR(pg_catalog.=) '' THEN 'Correct the cause, and run the script again.' ELSE hint END;
END;
PERFORM pg_catalog.set_config('search_path', path, true), pg_catalog.set_config('quote_all_identifiers', quoting, true),
	pg_catalog.set_config('standard_conforming_strings', strings, true);
END
$installation$;
