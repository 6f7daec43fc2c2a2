-- The operations of the suite portable, in the database of each edition.

INSERT INTO bench.figure (figure, title, unit, contestants, target) VALUES
	('charge_cpu', 'charge, server CPU', 'us', '{hand,idempotency,portable}', 1.15),
	('charge_wal', 'charge, WAL', 'bytes', '{hand,idempotency,portable}', 1.15),
	('claim_cpu', 'claim without a request, server CPU', 'us', '{hand,idempotency,portable}', 1.15),
	('claim_wal', 'claim without a request, WAL', 'bytes', '{hand,idempotency,portable}', 1.15),
	('replay_cpu', 'replay, server CPU', 'us', '{hand,idempotency,portable}', 1.15);

-- A claim without a request and without business work: the pattern, and the procedure of
-- the README.
CREATE FUNCTION bench.claim_1(p_key text) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	body jsonb;
BEGIN
	INSERT INTO bench.hand_key (key, request_hash, state, expires_at)
	VALUES (p_key, '', 'in_progress', now() + interval '24 hours')
	ON CONFLICT (key) DO NOTHING;
	IF NOT FOUND THEN
		SELECT response INTO body FROM bench.hand_key WHERE key = p_key;
		RETURN body;
	END IF;
	UPDATE bench.hand_key SET state = 'completed', response = '{"id": 1}' WHERE key = p_key;
	RETURN '{"id": 1}';
END $$;

CREATE FUNCTION bench.claim_2(p_key text) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim('charge.create', p_key);
	IF op.replayed THEN RETURN op.response; END IF;
	RETURN idempotency.complete('charge.create', p_key, '{"id": 1}'::json);
END $$;

-- One contestant's turn of an operation, each call in a transaction of its own. The first
-- replay stores the key.
CREATE PROCEDURE bench.turn(p_operation text, p_turn integer, p_times integer)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. p_times LOOP
		CASE p_operation || p_turn
			WHEN 'charge0' THEN PERFORM bench.charge_1(gen_random_uuid()::text, i, 12.50);
			WHEN 'charge1' THEN PERFORM bench.charge_2(gen_random_uuid()::text, i, 12.50);
			WHEN 'claim0' THEN PERFORM bench.claim_1(gen_random_uuid()::text);
			WHEN 'claim1' THEN PERFORM bench.claim_2(gen_random_uuid()::text);
			WHEN 'replay0' THEN PERFORM bench.charge_1('key', 1, 12.50);
			WHEN 'replay1' THEN PERFORM bench.charge_2('key', 1, 12.50);
		END CASE;
		COMMIT;
	END LOOP;
END $$;
