-- A shard of docs/scaling.md: psql -X -v ON_ERROR_STOP=1 -f shard.sql
--
-- on every shard
-- Tenants that are here, and tenants that are leaving. Every transaction that writes for a
-- tenant starts with shard.enter().
CREATE EXTENSION idempotency;
CREATE SCHEMA shard;
CREATE TABLE shard.tenant (tenant text PRIMARY KEY);
CREATE TABLE shard.closed (tenant text PRIMARY KEY);

CREATE FUNCTION shard.enter(p_tenant text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM shard.tenant AS t
    WHERE t.tenant = p_tenant AND NOT EXISTS (SELECT FROM shard.closed AS c WHERE c.tenant = p_tenant)
    FOR SHARE OF t;
    IF FOUND THEN RETURN; END IF;

    IF EXISTS (SELECT FROM shard.closed AS c WHERE c.tenant = p_tenant) THEN
        RAISE EXCEPTION 'tenant "%" is being moved', p_tenant
            USING ERRCODE = 'SH503', HINT = 'Try again in a moment, with the same key.';
    END IF;
    RAISE EXCEPTION 'tenant "%" does not live here', p_tenant
        USING ERRCODE = 'SH410', HINT = 'Ask the router again, with the same key.';
END $$;

-- Business tables and procedures, as an example.
CREATE SCHEMA api;
CREATE TABLE api.charge (
    tenant   text NOT NULL,
    id       uuid NOT NULL DEFAULT idempotency.uuidv7(),
    order_no text NOT NULL,
    amount   numeric NOT NULL,
    PRIMARY KEY (tenant, id)
);

CREATE FUNCTION api.charge_create(p_tenant text, p_key text, p_order text, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
    v_scope text := p_tenant || '/charge.create';
    op      idempotency.operation;
    body    json;
BEGIN
    PERFORM shard.enter(p_tenant);
    op := idempotency.claim(v_scope, p_key, json_build_object('order', p_order, 'amount', p_amount));
    IF op.replayed THEN RETURN op.response; END IF;

    INSERT INTO api.charge (tenant, order_no, amount) VALUES (p_tenant, p_order, p_amount)
    RETURNING json_build_object('id', id, 'order', order_no) INTO body;
    PERFORM idempotency.publish('charge.created', body, p_tenant || '/' || p_order);

    RETURN idempotency.complete(v_scope, p_key, body, 201);
END $$;

-- A handler: once(), because a move can redeliver events. It skips tenants that have left.
CREATE TABLE api.charge_count (tenant text PRIMARY KEY, charges bigint NOT NULL);

CREATE FUNCTION api.count_charge(event idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenant text := split_part(event.aggregate_id, '/', 1);
BEGIN
    PERFORM shard.enter(v_tenant);
    IF idempotency.once(v_tenant || '/count_charge', event.id::text, retention => '30 days') THEN
        INSERT INTO api.charge_count AS c VALUES (v_tenant, 1)
        ON CONFLICT (tenant) DO UPDATE SET charges = c.charges + 1;
    END IF;
EXCEPTION WHEN SQLSTATE 'SH410' THEN
    RETURN;
END $$;

-- The router connects as app, consumers as relay.
CREATE ROLE app LOGIN;
CREATE ROLE relay LOGIN;
SELECT idempotency.grant_client('app');
SELECT idempotency.grant_consumer('relay');
GRANT USAGE ON SCHEMA api, shard TO app;
GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA api TO app;
SELECT idempotency.subscribe('ledger', ARRAY['charge.*'], owner => 'relay');
SELECT idempotency.subscribe('counter', ARRAY['charge.created'], 'api.count_charge(idempotency.event)', owner => 'app');

-- The mover. The view has the events that a subscription has not received, or has parked.
CREATE VIEW shard.unread AS
    SELECT DISTINCT ON (e.seq) e.*
    FROM (
        SELECT o.seq, o.id, o.aggregatetype, o.aggregateid, o.type, o.payload, o.headers
        FROM idempotency.outbox AS o
        WHERE EXISTS (
            SELECT FROM (SELECT DISTINCT ON (subscription, partition) base, former_base, events
                FROM idempotency.position ORDER BY subscription, partition, version DESC) AS p
            WHERE o.seq = ANY (p.events) OR NOT pg_visible_in_snapshot(o.txid, p.base)
                OR p.former_base IS NOT NULL) -- after a restore, more than needed
        UNION ALL
        SELECT k.seq, k.id, k.aggregatetype, k.aggregateid, k.type, k.payload, k.headers
        FROM idempotency.parked AS k
    ) AS e
    ORDER BY e.seq;

CREATE ROLE mover LOGIN;
SELECT idempotency.grant_client('mover');
GRANT USAGE ON SCHEMA shard, api TO mover;
GRANT SELECT, INSERT, DELETE ON shard.tenant, shard.closed, idempotency.key TO mover;
GRANT SELECT, INSERT, DELETE ON ALL TABLES IN SCHEMA api TO mover;
GRANT SELECT ON shard.unread TO mover;
GRANT SELECT, UPDATE ON SEQUENCE idempotency.token TO mover;
