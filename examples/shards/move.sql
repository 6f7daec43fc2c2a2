-- Moves a tenant, as docs/scaling.md describes. Run it in an empty directory that other users
-- cannot read: it stores copies there. Repeat all of it if it fails.
--
-- psql variables: tenant; shard, the name of the new shard; old, new, router: connections of
-- the role mover

-- move 1: close the old shard
\connect :old
SET lock_timeout = '10s';
INSERT INTO shard.closed SELECT tenant FROM shard.tenant WHERE tenant = :'tenant' ON CONFLICT DO NOTHING;
DELETE FROM shard.tenant WHERE tenant = :'tenant';

-- move 2: take along
\connect :old
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
COPY (SELECT * FROM api.charge WHERE tenant = :'tenant') TO STDOUT (FORMAT binary) \g move.charge
COPY (SELECT * FROM api.charge_count WHERE tenant = :'tenant') TO STDOUT (FORMAT binary) \g move.charge_count
COPY (SELECT * FROM idempotency.key WHERE scope ^@ (:'tenant' || '/')) TO STDOUT (FORMAT binary) \g move.key
COPY (SELECT * FROM shard.unread WHERE aggregateid ^@ (:'tenant' || '/')) TO STDOUT (FORMAT binary) \g move.event
SELECT last_value AS token FROM idempotency.token \gset
SELECT EXISTS (SELECT FROM shard.closed WHERE tenant = :'tenant') AS closed \gset
COMMIT;

\connect :new
BEGIN;
SELECT EXISTS (SELECT FROM shard.tenant WHERE tenant = :'tenant') AS arrived \gset
\if :arrived
\elif :closed
    \copy api.charge FROM 'move.charge' (FORMAT binary)
    \copy api.charge_count FROM 'move.charge_count' (FORMAT binary)
    \copy idempotency.key FROM 'move.key' (FORMAT binary)
    CREATE TEMPORARY TABLE unread ON COMMIT DROP AS SELECT * FROM shard.unread WITH NO DATA;
    \copy unread FROM 'move.event' (FORMAT binary)
    SELECT count(idempotency.publish(aggregatetype, payload, aggregateid, type, headers, id))
    FROM (SELECT * FROM unread ORDER BY seq) AS event;
    -- The lock serializes moves; the million covers tokens drawn between nextval() and setval().
    SELECT pg_advisory_xact_lock('idempotency.token'::regclass::oid::bigint);
    SELECT setval('idempotency.token', greatest(nextval('idempotency.token'), :token) + 1000000);
    INSERT INTO shard.tenant VALUES (:'tenant');
\else
    DO $$ BEGIN RAISE EXCEPTION 'the tenant was not closed on its old shard'; END $$;
\endif
COMMIT;

-- move 3: route to the new shard
\connect :router
UPDATE route.tenant SET shard = :'shard' WHERE tenant = :'tenant';

-- move 4: clean up the old shard
\connect :old
BEGIN;
DELETE FROM api.charge WHERE tenant = :'tenant';
DELETE FROM api.charge_count WHERE tenant = :'tenant';
DELETE FROM idempotency.key WHERE scope ^@ (:'tenant' || '/');
DELETE FROM shard.closed WHERE tenant = :'tenant';
COMMIT;
