-- Opens the old shard of a tenant again, if the new one is not open. First end all sessions of
-- the mover on the new shard. The variables are those of move.sql.
--
-- give up
\connect :new
SELECT EXISTS (SELECT FROM shard.tenant WHERE tenant = :'tenant') AS arrived \gset
\if :arrived
    \warn 'the tenant has moved already'
\else
    \connect :old
    BEGIN;
    INSERT INTO shard.tenant SELECT tenant FROM shard.closed WHERE tenant = :'tenant' ON CONFLICT DO NOTHING;
    DELETE FROM shard.closed WHERE tenant = :'tenant';
    COMMIT;
\endif
