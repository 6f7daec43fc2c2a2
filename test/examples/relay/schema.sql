-- test/examples/relay/schema.sql
--
-- Additional objects of the publisher: accounts, and a procedure that books events on
-- them, a few in each transaction. Some transactions are rolled back.

CREATE SCHEMA test;
CREATE SEQUENCE test.rolled_back MINVALUE 0 START 0;

INSERT INTO bank.account (account) SELECT account FROM pg_catalog.generate_series(1, 40) account;

-- Accounts are booked in ascending order to prevent deadlocks.
CREATE PROCEDURE test.publish(p_events integer)
LANGUAGE plpgsql AS $$
DECLARE
	v_left integer := p_events;
	v_size integer;
	v_first integer;
BEGIN
	WHILE v_left > 0 LOOP
		v_size := least(v_left, 1 + floor(random() * 4)::integer);
		v_first := 1 + floor(random() * (41 - v_size))::integer;
		FOR v_next IN 0 .. v_size - 1 LOOP
			PERFORM bank.book(v_first + v_next, 1 + floor(random() * 100)::integer);
			-- sometimes the same account again
			IF v_size < v_left AND random() < 0.3 THEN
				PERFORM bank.book(v_first + v_next, 1);
				v_left := v_left - 1;
			END IF;
		END LOOP;
		v_left := v_left - v_size;
		COMMIT;

		IF random() < 0.1 THEN
			PERFORM bank.book(v_first, 1000000), nextval('test.rolled_back');
			ROLLBACK;
		END IF;
	END LOOP;
END $$;
