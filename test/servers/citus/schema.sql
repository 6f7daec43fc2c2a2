/* test/servers/citus/schema.sql: charges, distributed by tenant */

CREATE SCHEMA api;
CREATE TABLE api.charge (
	tenant text COLLATE "C" NOT NULL,
	id uuid NOT NULL,
	order_no text NOT NULL,
	amount numeric NOT NULL,
	PRIMARY KEY (tenant, id)
);
SELECT create_distributed_table('api.charge', 'tenant', shard_count => 8);
-- A table of another colocation group, for transactions that write on several nodes.
CREATE TABLE api.note (tenant text COLLATE "C" NOT NULL, note text NOT NULL);
SELECT create_distributed_table('api.note', 'tenant', colocate_with => 'none', shard_count => 4);

SELECT idempotency.distribute('api.charge');

CREATE FUNCTION api.charge(p_tenant text, p_key text, p_order text, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	v_scope text := p_tenant || '/charge';
	v_id uuid := gen_random_uuid();
	op idempotency.operation;
BEGIN
	op := idempotency.claim(v_scope, p_key, json_build_object('order', p_order, 'amount', p_amount));
	IF op.replayed THEN RETURN op.response; END IF;
	INSERT INTO api.charge (tenant, id, order_no, amount) VALUES (p_tenant, v_id, p_order, p_amount);
	RETURN idempotency.complete(v_scope, p_key, json_build_object('id', v_id, 'order', p_order), 201);
END $$;

-- The same, but never delegated.
DO $$
BEGIN
	EXECUTE replace(pg_get_functiondef('api.charge'::regproc), 'FUNCTION api.charge', 'FUNCTION api.charge_here');
END $$;
SELECT create_distributed_function('api.charge(text, text, text, numeric)', 'p_tenant', colocate_with => 'api.charge');

-- For the cost: the write alone.
CREATE FUNCTION api.write(p_tenant text, p_key text, p_order text, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	v_id uuid := gen_random_uuid();
BEGIN
	INSERT INTO api.charge (tenant, id, order_no, amount) VALUES (p_tenant, v_id, p_order, p_amount);
	RETURN json_build_object('id', v_id, 'order', p_order);
END $$;
SELECT create_distributed_function('api.write(text, text, text, numeric)', 'p_tenant', colocate_with => 'api.charge');

-- The control: a key table that does not decide who writes.
CREATE TABLE api.unarbitrated (tenant text COLLATE "C" NOT NULL, key text NOT NULL, response json NOT NULL);
SELECT create_distributed_table('api.unarbitrated', 'tenant', colocate_with => 'api.charge');
CREATE FUNCTION api.charge_unarbitrated(p_tenant text, p_key text, p_order text, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	v_id uuid := gen_random_uuid();
	body json;
BEGIN
	SELECT u.response INTO body FROM api.unarbitrated AS u WHERE u.tenant = p_tenant AND u.key = p_key LIMIT 1;
	IF FOUND THEN RETURN body; END IF;
	INSERT INTO api.charge (tenant, id, order_no, amount) VALUES (p_tenant, v_id, p_order, p_amount);
	body := json_build_object('id', v_id, 'order', p_order);
	INSERT INTO api.unarbitrated (tenant, key, response) VALUES (p_tenant, p_key, body);
	RETURN body;
END $$;
SELECT create_distributed_function('api.charge_unarbitrated(text, text, text, numeric)', 'p_tenant', colocate_with => 'api.charge');
