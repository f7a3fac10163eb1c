-- The nodes of a cluster. `lease_until` is by the database's clock; a node that never started has
-- none. `incarnation` is that of its fence, always changed together with it.
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    address TEXT NOT NULL,
    state TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    lease_until REAL,
    lost INTEGER NOT NULL,
    labels TEXT NOT NULL,
    taints TEXT NOT NULL,
    capacity TEXT NOT NULL,
    used TEXT NOT NULL,
    runtime TEXT,
    cpu TEXT NOT NULL,
    version TEXT NOT NULL,
    joined_at REAL NOT NULL,
    seen_at REAL
) WITHOUT ROWID;
CREATE UNIQUE INDEX node_names ON nodes (name) WHERE state <> 'removed';

-- Which incarnation of a node may write.
CREATE TABLE node_fences (
    node TEXT PRIMARY KEY REFERENCES nodes (id),
    incarnation INTEGER NOT NULL
) WITHOUT ROWID;

-- Each lets one node join, once.
CREATE TABLE node_tokens (
    id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    expires_at REAL NOT NULL,
    labels TEXT NOT NULL,
    used_at REAL
) WITHOUT ROWID;

-- What all servers of a cluster share: keys, sealed with the cluster's, and settings.
CREATE TABLE cluster_values (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;

-- What one node at a time does for all.
CREATE TABLE duties (
    name TEXT PRIMARY KEY,
    node TEXT NOT NULL,
    lease_until REAL NOT NULL
) WITHOUT ROWID;

-- Who alone may change a session, and whose disk has a snapshot.
ALTER TABLE sessions ADD COLUMN holder TEXT;
ALTER TABLE snapshots ADD COLUMN node TEXT;
CREATE INDEX sessions_held ON sessions (holder, state, created_at, id) WHERE holder IS NOT NULL;
CREATE INDEX snapshots_undurable_by_node ON snapshots (node, created_at, id)
    WHERE durable_at IS NULL AND node IS NOT NULL;
CREATE INDEX operations_by_server ON operations (server, created_at, id)
    WHERE state IN ('pending', 'running');
