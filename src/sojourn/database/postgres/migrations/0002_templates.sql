-- What a session is kept for; `template` ones hold the versions of a template as their snapshots.
ALTER TABLE sessions ADD COLUMN kind text COLLATE "C" NOT NULL DEFAULT 'session';
DROP INDEX session_names;
CREATE UNIQUE INDEX session_names ON sessions (tenant, kind, name)
    WHERE name IS NOT NULL AND state <> 'deleted';
-- Counts and pages of one kind are read from the indexes alone.
DROP INDEX sessions_by_tenant, sessions_by_state;
CREATE INDEX sessions_by_tenant ON sessions (tenant, state, created_at, id) INCLUDE (kind);
CREATE INDEX sessions_by_state ON sessions (state, created_at, id) INCLUDE (kind);
