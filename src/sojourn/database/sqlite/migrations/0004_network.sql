-- A session's network policy; sessions made before there was one reach nothing, as they did.
ALTER TABLE sessions ADD COLUMN network TEXT NOT NULL DEFAULT '{}';

-- What left sessions. `lasting`: no rollback takes it back. `pending`: it began after everything
-- that is in a snapshot of the session's line. `snapshot` was the head when it began.
CREATE TABLE effects (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    began_at REAL NOT NULL,
    outcome TEXT NOT NULL,
    lasting INTEGER NOT NULL,
    pending INTEGER NOT NULL,
    snapshot TEXT,
    effect TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX effects_by_session ON effects (session, began_at, id);
CREATE INDEX effects_pending ON effects (session, began_at) WHERE pending;
CREATE INDEX effects_open ON effects (began_at) WHERE outcome = 'open';

-- Which effects lie between a snapshot and the one before it in the tree.
CREATE TABLE snapshot_effects (
    snapshot TEXT NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    effect TEXT NOT NULL REFERENCES effects (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    PRIMARY KEY (snapshot, effect)
) WITHOUT ROWID;
CREATE INDEX snapshot_effects_by_effect ON snapshot_effects (effect);
-- Where a snapshot between two others goes, what lay before it lies before its children.
CREATE TRIGGER snapshot_passed_on AFTER UPDATE OF parent ON snapshots
WHEN OLD.parent IS NOT NULL AND NEW.parent IS NOT OLD.parent
BEGIN
    INSERT OR IGNORE INTO snapshot_effects (snapshot, effect)
        SELECT NEW.id, effect FROM snapshot_effects WHERE snapshot = OLD.parent;
END;

-- Secrets of tenants: what `value` holds is encrypted, `uses` says where it is put in.
CREATE TABLE secrets (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    uses TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;

-- Ports of sessions that are reached from outside. `listens_at` is the host's port of one of kind
-- tcp, `sources` are the addresses that may use it, `token` opens one that is not public.
CREATE TABLE exposed_ports (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    port INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    public INTEGER NOT NULL,
    token TEXT NOT NULL,
    sources TEXT NOT NULL,
    listens_at INTEGER,
    created_at REAL NOT NULL,
    PRIMARY KEY (session, port)
) WITHOUT ROWID;
CREATE UNIQUE INDEX exposed_ports_listening ON exposed_ports (listens_at)
    WHERE listens_at IS NOT NULL;
-- Of a deleted session no port is exposed, whatever statement deletes it.
CREATE TRIGGER session_unexposed AFTER UPDATE OF state ON sessions
WHEN NEW.state = 'deleted' AND OLD.state <> 'deleted'
BEGIN
    DELETE FROM exposed_ports WHERE session = NEW.id;
END;
