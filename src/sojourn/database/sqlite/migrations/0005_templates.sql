-- What a session is kept for; `template` ones hold the versions of a template as their snapshots.
ALTER TABLE sessions ADD COLUMN kind TEXT NOT NULL DEFAULT 'session';
DROP INDEX session_names;
CREATE UNIQUE INDEX session_names ON sessions (tenant, kind, name)
    WHERE name IS NOT NULL AND state <> 'deleted';
