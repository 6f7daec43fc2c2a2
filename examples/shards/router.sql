-- The router of docs/scaling.md, with PL/Proxy: psql -X -v ON_ERROR_STOP=1 -f router.sql
--
-- on the router
CREATE EXTENSION plproxy;
CREATE SCHEMA route;
CREATE TABLE route.tenant (tenant text PRIMARY KEY, shard name NOT NULL);

CREATE FUNCTION route.home(p_tenant text) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_shard text;
BEGIN
    SELECT shard INTO v_shard FROM route.tenant WHERE tenant = p_tenant;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no tenant "%"', p_tenant USING ERRCODE = 'SH404';
    END IF;
    RETURN v_shard;
END $$;

CREATE SCHEMA api;
CREATE FUNCTION api.charge_create(p_tenant text, p_key text, p_order text, p_amount numeric) RETURNS json
LANGUAGE plproxy AS $$
    CLUSTER route.home(p_tenant);
    RUN ON 0;
$$;

CREATE ROLE app LOGIN;
GRANT USAGE ON SCHEMA route, api TO app;
GRANT SELECT ON route.tenant TO app;

CREATE ROLE mover LOGIN;
GRANT USAGE ON SCHEMA route TO mover;
GRANT SELECT, UPDATE ON route.tenant TO mover;
