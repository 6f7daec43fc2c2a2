-- Installs the edition that the variable EDITION of the environment names: the extension, or
-- with "portable" the portable edition.
\set portable `test "$EDITION" = portable && echo true || echo false`
\if :portable
\ir ../portable/idempotency.sql
RESET search_path;
\else
CREATE EXTENSION idempotency;
\endif
