-- Ids, and whatever else is put in order, compare by their bytes, as everywhere else. Columns that
-- are looked into are jsonb; what may hold any text (a NUL, too, which jsonb refuses) is json.
CREATE TABLE settings (
    key text PRIMARY KEY,
    value text NOT NULL
);

CREATE TABLE tenants (
    id text COLLATE "C" PRIMARY KEY,
    name text NOT NULL UNIQUE,
    created_at double precision NOT NULL
);

CREATE TABLE tokens (
    id text COLLATE "C" PRIMARY KEY,
    hash text NOT NULL UNIQUE,
    tenant text COLLATE "C" NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    role text NOT NULL,
    label text,
    created_at double precision NOT NULL,
    revoked_at double precision
);

-- Transactions that were committed not long ago. Each inserts its own id: when a connection is lost
-- while it commits, whoever asks inserts the same id, and so learns whether it is there or makes
-- sure that it never will be.
CREATE TABLE commits (
    id text COLLATE "C" PRIMARY KEY
);

-- Foreign keys are checked at commit, so that what is written together may come in any order.
CREATE TABLE sessions (
    id text COLLATE "C" PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    name text,
    labels jsonb NOT NULL,
    template text NOT NULL,
    env json NOT NULL,
    limits json NOT NULL,
    policy jsonb NOT NULL,
    driver text NOT NULL,
    state text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL CHECK (epoch >= 0),
    head text COLLATE "C",
    parent_session text COLLATE "C",
    forked_from text COLLATE "C",
    sandbox text,
    node text,
    idle_deadline double precision,
    lifetime_deadline double precision,
    cause text,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    network json NOT NULL
) WITH (fillfactor = 85);
-- A name is taken only by a live session.
CREATE UNIQUE INDEX session_names ON sessions (tenant, name)
    WHERE name IS NOT NULL AND state <> 'deleted';
CREATE INDEX sessions_by_name ON sessions (name) WHERE name IS NOT NULL AND state <> 'deleted';
-- Pages of a list: the newest of each state, for one tenant and for all.
CREATE INDEX sessions_by_tenant ON sessions (tenant, state, created_at, id);
CREATE INDEX sessions_by_state ON sessions (state, created_at, id);
CREATE INDEX sessions_by_label ON sessions USING gin (labels jsonb_path_ops);
CREATE INDEX sessions_by_head ON sessions (head) WHERE head IS NOT NULL;
CREATE INDEX sessions_by_parent ON sessions (parent_session) WHERE parent_session IS NOT NULL;
CREATE INDEX sessions_by_fork ON sessions (forked_from) WHERE forked_from IS NOT NULL;
CREATE INDEX sessions_due ON sessions (LEAST(idle_deadline, lifetime_deadline), id)
    WHERE state IN ('running', 'paused');
CREATE INDEX sessions_expiring ON sessions (lifetime_deadline, id)
    WHERE state IN ('suspended', 'failed') AND (policy ->> 'on_expiry') = 'delete';
CREATE INDEX sessions_deleted ON sessions (updated_at) WHERE state = 'deleted';

-- What the code never does, the database refuses too.
CREATE FUNCTION refuse_session_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch < OLD.epoch THEN
        RAISE EXCEPTION 'the epoch of a session never shrinks' USING ERRCODE = 'check_violation';
    END IF;
    RAISE EXCEPTION 'a deleted session stays deleted' USING ERRCODE = 'check_violation';
END $$;
CREATE TRIGGER session_guarded BEFORE UPDATE OF epoch, state ON sessions FOR EACH ROW
    WHEN (NEW.epoch < OLD.epoch OR (OLD.state = 'deleted' AND NEW.state <> 'deleted'))
    EXECUTE FUNCTION refuse_session_change();

CREATE TABLE snapshots (
    id text COLLATE "C" PRIMARY KEY,
    session text COLLATE "C" NOT NULL REFERENCES sessions (id) DEFERRABLE INITIALLY DEFERRED,
    tenant text COLLATE "C" NOT NULL,
    parent text COLLATE "C" REFERENCES snapshots (id) DEFERRABLE INITIALLY DEFERRED,
    kind text NOT NULL,
    label text,
    created_at double precision NOT NULL,
    fingerprint text NOT NULL,
    has_memory boolean NOT NULL,
    memory_bytes bigint NOT NULL,
    layer_bytes bigint NOT NULL,
    layers json NOT NULL,
    image text,
    turn bigint,
    hidden boolean NOT NULL,
    thinned boolean NOT NULL,
    durable_at double precision
);
CREATE INDEX snapshots_by_session ON snapshots (session, created_at, id);
CREATE INDEX snapshots_by_parent ON snapshots (parent) WHERE parent IS NOT NULL;
CREATE INDEX snapshots_undurable ON snapshots (created_at, id) WHERE durable_at IS NULL;
CREATE INDEX snapshots_waiting ON snapshots (session, created_at)
    WHERE durable_at IS NULL AND NOT hidden;
CREATE INDEX snapshots_hidden ON snapshots (created_at, id) WHERE hidden;
ALTER TABLE sessions ADD CONSTRAINT sessions_head FOREIGN KEY (head) REFERENCES snapshots (id)
    ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED;

-- A session that has operations is not removed without them being named: one that was begun
-- meanwhile makes the removal fail.
CREATE TABLE operations (
    id text COLLATE "C" PRIMARY KEY,
    session text COLLATE "C" NOT NULL REFERENCES sessions (id) DEFERRABLE INITIALLY DEFERRED,
    tenant text COLLATE "C" NOT NULL,
    verb text NOT NULL,
    key text,
    digest text NOT NULL,
    request json NOT NULL,
    exclusive boolean NOT NULL,
    state text COLLATE "C" NOT NULL,
    step text,
    step_number bigint NOT NULL,
    data json NOT NULL,
    result json,
    error json,
    server text COLLATE "C" NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    finished_at double precision
) WITH (fillfactor = 85);
-- At most one unfinished exclusive operation per session.
CREATE UNIQUE INDEX operations_exclusive ON operations (session)
    WHERE exclusive AND state IN ('pending', 'running');
CREATE INDEX operations_unfinished ON operations (created_at, id)
    WHERE state IN ('pending', 'running');
CREATE INDEX operations_by_session ON operations (session, created_at, id);
CREATE INDEX operations_finished ON operations (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE idempotency (
    tenant text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    digest text NOT NULL,
    operation text COLLATE "C" NOT NULL REFERENCES operations (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    expires_at double precision NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX idempotency_by_operation ON idempotency (operation);
CREATE INDEX idempotency_by_expiry ON idempotency (expires_at);

CREATE TABLE events (
    session text COLLATE "C" NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    sequence bigint NOT NULL,
    at double precision NOT NULL,
    actor text NOT NULL,
    kind text COLLATE "C" NOT NULL,
    result text,
    details json NOT NULL,
    before text COLLATE "C",
    after text COLLATE "C",
    operation text COLLATE "C",
    PRIMARY KEY (session, sequence)
);

-- What is gone here and may still lie in the object store. The triggers write it, so that it is
-- committed together with the removal whatever statement removes.
CREATE TABLE store_removals (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    object text COLLATE "C" NOT NULL
);
CREATE FUNCTION note_snapshot_removal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO store_removals (kind, tenant, object) VALUES ('snapshot', OLD.tenant, OLD.id);
    RETURN NULL;
END $$;
CREATE TRIGGER snapshot_removed AFTER DELETE ON snapshots FOR EACH ROW
    EXECUTE FUNCTION note_snapshot_removal();
CREATE FUNCTION note_session_removal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO store_removals (kind, tenant, object) VALUES ('session', NEW.tenant, NEW.id);
    RETURN NULL;
END $$;
CREATE TRIGGER session_removed AFTER UPDATE OF state ON sessions FOR EACH ROW
    WHEN (NEW.state = 'deleted' AND OLD.state <> 'deleted')
    EXECUTE FUNCTION note_session_removal();

-- The digest of what was last written to the object store about a session.
CREATE TABLE store_records (
    session text COLLATE "C" PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    digest text NOT NULL
);

-- What left sessions. `lasting`: no rollback takes it back. `pending`: it began after everything
-- that is in a snapshot of the session's line. `snapshot` was the head when it began.
CREATE TABLE effects (
    id text COLLATE "C" PRIMARY KEY,
    session text COLLATE "C" NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    began_at double precision NOT NULL,
    outcome text NOT NULL,
    lasting boolean NOT NULL,
    pending boolean NOT NULL,
    snapshot text COLLATE "C",
    effect json NOT NULL
);
CREATE INDEX effects_by_session ON effects (session, began_at, id);
CREATE INDEX effects_pending ON effects (session, began_at) WHERE pending;
CREATE INDEX effects_open ON effects (began_at, id) WHERE outcome = 'open';

-- Which effects lie between a snapshot and the one before it in the tree.
CREATE TABLE snapshot_effects (
    snapshot text COLLATE "C" NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    effect text COLLATE "C" NOT NULL REFERENCES effects (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    PRIMARY KEY (snapshot, effect)
);
CREATE INDEX snapshot_effects_by_effect ON snapshot_effects (effect);
-- Where a snapshot between two others goes, what lay before it lies before its children.
CREATE FUNCTION pass_effects_on() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO snapshot_effects (snapshot, effect)
        SELECT NEW.id, effect FROM snapshot_effects WHERE snapshot = OLD.parent
        ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE TRIGGER snapshot_passed_on AFTER UPDATE OF parent ON snapshots FOR EACH ROW
    WHEN (OLD.parent IS NOT NULL AND NEW.parent IS DISTINCT FROM OLD.parent)
    EXECUTE FUNCTION pass_effects_on();

-- Secrets of tenants: what `value` holds is encrypted, `uses` says where it is put in.
CREATE TABLE secrets (
    tenant text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    uses json NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    PRIMARY KEY (tenant, name)
);

-- Ports of sessions that are reached from outside. `listens_at` is the host's port of one of kind
-- tcp, `sources` are the addresses that may use it, `token` opens one that is not public.
CREATE TABLE exposed_ports (
    session text COLLATE "C" NOT NULL REFERENCES sessions (id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    port integer NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    kind text NOT NULL,
    public boolean NOT NULL,
    token text NOT NULL,
    sources json NOT NULL,
    listens_at integer,
    created_at double precision NOT NULL,
    PRIMARY KEY (session, port)
);
CREATE UNIQUE INDEX exposed_ports_listening ON exposed_ports (listens_at)
    WHERE listens_at IS NOT NULL;
-- Of a deleted session no port is exposed, whatever statement deletes it.
CREATE FUNCTION unexpose_session() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM exposed_ports WHERE session = NEW.id;
    RETURN NULL;
END $$;
CREATE TRIGGER session_unexposed AFTER UPDATE OF state ON sessions FOR EACH ROW
    WHEN (NEW.state = 'deleted' AND OLD.state <> 'deleted')
    EXECUTE FUNCTION unexpose_session();
