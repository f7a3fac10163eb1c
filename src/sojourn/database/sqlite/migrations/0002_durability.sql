-- What the object store has. A snapshot is durable since `durable_at`, or not yet.
ALTER TABLE snapshots ADD COLUMN durable_at REAL;
CREATE INDEX snapshots_undurable ON snapshots (created_at, id) WHERE durable_at IS NULL;

-- What is gone here and may still lie in the object store. The triggers write it, so that it is
-- committed together with the removal whatever statement removes.
CREATE TABLE store_removals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    object TEXT NOT NULL
);
CREATE TRIGGER snapshot_removed AFTER DELETE ON snapshots
BEGIN
    INSERT INTO store_removals (kind, tenant, object) VALUES ('snapshot', OLD.tenant, OLD.id);
END;
CREATE TRIGGER session_removed AFTER UPDATE OF state ON sessions
WHEN NEW.state = 'deleted' AND OLD.state <> 'deleted'
BEGIN
    INSERT INTO store_removals (kind, tenant, object) VALUES ('session', NEW.tenant, NEW.id);
END;

-- The digest of what was last written to the object store about a session.
CREATE TABLE store_records (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    digest TEXT NOT NULL
) WITHOUT ROWID;
