-- test/examples/relay/check.sql
--
-- Compares the consumer's database with what the publisher has committed, which the
-- temporary table "published" holds.  Prints one figure a line: its name, a tab, and
-- the number.

\set ON_ERROR_STOP on
\pset format unaligned
\pset tuples_only on
\pset fieldsep '\t'

CREATE TEMPORARY TABLE published (event uuid, account integer, version bigint, amount bigint);
\copy published FROM pstdin

SELECT 'published', count(*) FROM published;
SELECT 'effects', count(*) FROM statement.line;
SELECT 'lost', count(*) FROM published p
WHERE NOT EXISTS (SELECT FROM statement.line l WHERE l.event = p.event);
SELECT 'twice', count(*) FROM (SELECT FROM statement.line GROUP BY event HAVING count(*) > 1) twice;
SELECT 'unpublished', count(*) FROM statement.line l
WHERE NOT EXISTS (SELECT FROM published p WHERE p.event = l.event);
SELECT 'altered', count(*) FROM statement.line l JOIN published p USING (event)
WHERE (l.account, l.version, l.amount) IS DISTINCT FROM (p.account, p.version, p.amount);

-- Of two lines of one account, the later one has the higher version.
SELECT 'disordered', count(*) FROM (
	SELECT version, lag(version) OVER (PARTITION BY account ORDER BY line) AS before
	FROM statement.line
) line WHERE version < before;

SELECT 'balances', count(*) FROM (
	SELECT account, sum(amount) AS balance, max(version) AS version FROM published GROUP BY account
) p FULL JOIN statement.account a USING (account)
WHERE (p.balance, p.version) IS DISTINCT FROM (a.balance, a.version);
