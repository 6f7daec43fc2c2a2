-- standard_conforming_strings = off: a backslash escapes, in arguments too.  Version 19
-- has no such setting, and a second expected output.

SELECT current_setting('server_version_num')::int >= 190000 AS always_on \gset
\if :always_on
	\quit
\endif

CREATE FUNCTION handler(request json) RETURNS json LANGUAGE sql AS 'SELECT request';
SET standard_conforming_strings = off;
SET escape_string_warning = off;
BEGIN;
SELECT outcome FROM idempotency.claim('strings', 'back\\slash', '{"a": "\\n"}');
SELECT idempotency.complete('strings', 'back\\slash', '{"path": "C:\\\\temp"}', 200, '{"X": "\\u0041"}');
COMMIT;
SELECT outcome, headers, response FROM idempotency.claim('strings', 'back\\slash', '{"a": "\\u000A"}');
SELECT outcome, response FROM idempotency.run('strings', 'run', '{"a": "\\t"}', 'handler(json)');
SELECT idempotency.once('strings', 'quote\'d'), idempotency.once('strings', 'quote''d');
SELECT * FROM idempotency.once_many('strings', '{"a\\\\b"}'::text[]);
SELECT status FROM idempotency.peek('strings', 'back\\slash');
SELECT key, state FROM idempotency.keys WHERE scope = 'strings' AND key ~ '[\\\\'']' ORDER BY key;
SELECT idempotency.forget('strings', 'back\\slash');
CREATE ROLE regress_idempotency_strings;
SELECT idempotency.grant_client('regress_idempotency_strings'), idempotency.grant_operator('regress_idempotency_strings');
DROP OWNED BY regress_idempotency_strings;
DROP ROLE regress_idempotency_strings;
-- extension only: the statement CREATE EXTENSION
-- The extension can be installed under this setting.
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
SELECT idempotency.once('strings', 'a\\b'), idempotency.once('strings', 'a\\b');
-- both editions
DROP FUNCTION handler;
