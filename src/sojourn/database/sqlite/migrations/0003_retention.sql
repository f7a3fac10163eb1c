-- Sessions made before there was retention keep all they have, as they were told.
UPDATE sessions SET policy = json_set(policy, '$.retention', json('null'));
CREATE INDEX sessions_by_fork ON sessions (forked_from) WHERE forked_from IS NOT NULL;
