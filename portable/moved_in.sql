/* portable/moved_in.sql: fills the tables of the other edition, for to_extension.sql and from_extension.sql */

INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, fingerprint, response, headers, token, attempt,
	leased_at, leased_until, recovery_point, recovery_state, request, retention, finished_by)
SELECT * FROM pg_temp.moved_key;
INSERT INTO idempotency.configuration (name, scope, value) SELECT * FROM pg_temp.moved_configuration;
INSERT INTO idempotency.outbox SELECT * FROM pg_temp.moved_outbox;
SELECT setval('idempotency.outbox_seq', n.last) AS last_number FROM pg_temp.moved_number AS n WHERE n.last IS NOT NULL;
INSERT INTO idempotency.subscription SELECT * FROM pg_temp.moved_subscription;
INSERT INTO idempotency.partition SELECT * FROM pg_temp.moved_partition;
UPDATE pg_temp.moved_position AS n SET relation = 'idempotency.outbox'::regclass WHERE n.relation = 0;
INSERT INTO idempotency.position SELECT * FROM pg_temp.moved_position;
INSERT INTO idempotency.parked SELECT * FROM pg_temp.moved_parked;
