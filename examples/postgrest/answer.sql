-- Behind PostgREST, a function returns internal.answer(op): docs/howto/postgrest.md.
--
-- Returns the stored response, or the problem if there is none.
CREATE FUNCTION internal.answer(op idempotency.operation) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    problem json := idempotency.problem(op);
BEGIN
    PERFORM set_config('response.status', coalesce(problem ->> 'status', op.status::text), true),
        set_config('response.headers', (
            SELECT json_agg(json_build_object(name, value))
            FROM (
                SELECT key, value FROM json_each_text(coalesce(idempotency.problem_headers(op), op.headers))
                UNION ALL SELECT 'Idempotent-Replayed', 'true' WHERE op.replayed
            ) AS header (name, value))::text, true);
    RETURN coalesce(problem, op.response);
END $$;
