-- Sessions made before there was retention keep all they have, as they were told.
UPDATE sessions SET policy = json_set(policy, '$.retention', json('null'));
-- Few rows of many: read without those that nobody looks for.
CREATE INDEX snapshots_hidden ON snapshots (created_at, id) WHERE hidden;
CREATE INDEX snapshots_waiting ON snapshots (session, created_at)
    WHERE durable_at IS NULL AND NOT hidden;
CREATE INDEX sessions_by_fork ON sessions (forked_from) WHERE forked_from IS NOT NULL;
