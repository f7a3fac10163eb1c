-- The nodes of a cluster. `lease_until` is by the database's clock; a node that never started has
-- none. `incarnation` is that of its fence, always changed together with it.
CREATE TABLE nodes (
    id text COLLATE "C" PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    address text NOT NULL,
    state text COLLATE "C" NOT NULL,
    incarnation bigint NOT NULL,
    lease_until double precision,
    lost boolean NOT NULL,
    labels json NOT NULL,
    taints json NOT NULL,
    capacity json NOT NULL,
    used json NOT NULL,
    runtime text,
    cpu json NOT NULL,
    version text NOT NULL,
    joined_at double precision NOT NULL,
    seen_at double precision
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX node_names ON nodes (name) WHERE state <> 'removed';

-- Which incarnation of a node may write. Every transaction of a node locks its row against change;
-- a table of its own, so that renewals of leases do not meet them.
CREATE TABLE node_fences (
    node text COLLATE "C" PRIMARY KEY REFERENCES nodes (id),
    incarnation bigint NOT NULL
) WITH (fillfactor = 50);

-- Each lets one node join, once.
CREATE TABLE node_tokens (
    id text COLLATE "C" PRIMARY KEY,
    digest text NOT NULL,
    expires_at double precision NOT NULL,
    labels json NOT NULL,
    used_at double precision
);

-- What all servers of a cluster share: keys, sealed with the cluster's, and settings.
CREATE TABLE cluster_values (
    name text COLLATE "C" PRIMARY KEY,
    value bytea NOT NULL
);

-- What one node at a time does for all.
CREATE TABLE duties (
    name text COLLATE "C" PRIMARY KEY,
    node text COLLATE "C" NOT NULL,
    lease_until double precision NOT NULL
);

-- Who alone may change a session, and whose disk has a snapshot.
ALTER TABLE sessions ADD COLUMN holder text COLLATE "C";
ALTER TABLE snapshots ADD COLUMN node text COLLATE "C";
CREATE INDEX sessions_held ON sessions (holder, state, created_at, id) INCLUDE (kind)
    WHERE holder IS NOT NULL;
CREATE INDEX snapshots_undurable_by_node ON snapshots (node, created_at, id)
    WHERE durable_at IS NULL AND node IS NOT NULL;
CREATE INDEX operations_by_server ON operations (server, created_at, id)
    WHERE state IN ('pending', 'running');
