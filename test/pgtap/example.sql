-- The procedure of examples/testing, tested as docs/howto/testing.md shows: all in one
-- transaction that rolls back.

SET search_path = public, pg_catalog;
BEGIN;
\ir ../../examples/testing/booking.sql
SELECT plan(6);

SELECT is(booking_create('order-1', 'ann', 25)::text, '{"booking" : 1}', 'the first request books');
SELECT is(booking_create('order-1', 'ann', 25)::text, '{"booking" : 1}', 'a retry gets the same answer');
SELECT is(count(*), 1::bigint, 'there is one booking') FROM booking;
SELECT throws_ok($$SELECT booking_create('order-1', 'ann', 26)$$, 'IK422', NULL, 'another request is refused');
SELECT lives_ok('SELECT idempotency.check_commit()', 'COMMIT would succeed');

SELECT outcome FROM idempotency.claim('booking.create', 'order-2') \g /dev/null
SELECT throws_ok('SELECT idempotency.check_commit()', 'IK428', NULL, 'a claim without complete() could not commit');

SELECT * FROM finish();
ROLLBACK;
