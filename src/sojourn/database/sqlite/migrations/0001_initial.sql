CREATE TABLE settings (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE tenants (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL
);

CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    hash TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    label TEXT,
    created_at REAL NOT NULL,
    revoked_at REAL
);

-- Foreign keys are checked at commit, so that what is written together may come in any order.
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT,
    labels TEXT NOT NULL,
    template TEXT NOT NULL,
    env TEXT NOT NULL,
    limits TEXT NOT NULL,
    policy TEXT NOT NULL,
    driver TEXT NOT NULL,
    state TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    head TEXT REFERENCES snapshots (id) ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED,
    parent_session TEXT,
    forked_from TEXT,
    sandbox TEXT,
    node TEXT,
    idle_deadline REAL,
    lifetime_deadline REAL,
    cause TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
);
-- A name is taken only by a live session.
CREATE UNIQUE INDEX session_names ON sessions (tenant, name)
    WHERE name IS NOT NULL AND state <> 'deleted';
CREATE INDEX sessions_newest ON sessions (created_at, id);
CREATE INDEX sessions_by_tenant ON sessions (tenant, created_at, id);
CREATE INDEX sessions_by_state ON sessions (state);
CREATE INDEX sessions_by_lifetime ON sessions (lifetime_deadline)
    WHERE lifetime_deadline IS NOT NULL;
CREATE INDEX sessions_by_head ON sessions (head);
CREATE INDEX sessions_by_parent ON sessions (parent_session) WHERE parent_session IS NOT NULL;

-- What the code never does, the database refuses too.
CREATE TRIGGER epoch_never_shrinks BEFORE UPDATE OF epoch ON sessions WHEN NEW.epoch < OLD.epoch
BEGIN
    SELECT RAISE(ABORT, 'the epoch of a session never shrinks');
END;
CREATE TRIGGER deleted_is_final BEFORE UPDATE OF state ON sessions
WHEN OLD.state = 'deleted' AND NEW.state <> 'deleted'
BEGIN
    SELECT RAISE(ABORT, 'a deleted session stays deleted');
END;

CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) DEFERRABLE INITIALLY DEFERRED,
    tenant TEXT NOT NULL,
    parent TEXT REFERENCES snapshots (id) DEFERRABLE INITIALLY DEFERRED,
    kind TEXT NOT NULL,
    label TEXT,
    created_at REAL NOT NULL,
    fingerprint TEXT NOT NULL,
    has_memory INTEGER NOT NULL,
    memory_bytes INTEGER NOT NULL,
    layer_bytes INTEGER NOT NULL,
    layers TEXT NOT NULL,
    image TEXT,
    turn INTEGER,
    hidden INTEGER NOT NULL,
    thinned INTEGER NOT NULL
);
CREATE INDEX snapshots_by_session ON snapshots (session, created_at, id);
CREATE INDEX snapshots_by_parent ON snapshots (parent) WHERE parent IS NOT NULL;

CREATE TABLE operations (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    tenant TEXT NOT NULL,
    verb TEXT NOT NULL,
    key TEXT,
    digest TEXT NOT NULL,
    request TEXT NOT NULL,
    exclusive INTEGER NOT NULL,
    state TEXT NOT NULL,
    step TEXT,
    step_number INTEGER NOT NULL,
    data TEXT NOT NULL,
    result TEXT,
    error TEXT,
    server TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    finished_at REAL
);
-- At most one unfinished exclusive operation per session.
CREATE UNIQUE INDEX operations_exclusive ON operations (session)
    WHERE exclusive AND state IN ('pending', 'running');
CREATE INDEX operations_unfinished ON operations (created_at, id)
    WHERE state IN ('pending', 'running');
CREATE INDEX operations_by_session ON operations (session, created_at, id);
CREATE INDEX operations_finished ON operations (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE idempotency (
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    digest TEXT NOT NULL,
    operation TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    expires_at REAL NOT NULL,
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE INDEX idempotency_by_operation ON idempotency (operation);
CREATE INDEX idempotency_by_expiry ON idempotency (expires_at);

CREATE TABLE events (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    sequence INTEGER NOT NULL,
    at REAL NOT NULL,
    actor TEXT NOT NULL,
    kind TEXT NOT NULL,
    result TEXT,
    details TEXT NOT NULL,
    before TEXT,
    after TEXT,
    operation TEXT,
    PRIMARY KEY (session, sequence)
) WITHOUT ROWID;
