-- name: insert_snapshot
INSERT INTO snapshots ({snapshot}) VALUES ({:snapshot});

-- name: snapshot_row
SELECT {snapshot} FROM snapshots WHERE id = :id;

-- name: find_snapshot
SELECT {snapshot} FROM snapshots
WHERE id = :id AND (CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant) AND (:hidden OR NOT hidden);

-- name: list_snapshots
SELECT {snapshot} FROM snapshots
WHERE session = :session AND NOT hidden ORDER BY created_at, id;

-- name: update_snapshot
UPDATE snapshots SET {assignments} WHERE id = :where_id RETURNING {snapshot};

-- name: snapshot_users
-- Who keeps a snapshot from being deleted: the sessions at it, and its children while it is shown.
SELECT 'session', id FROM sessions WHERE head = :id AND state <> 'deleted'
UNION ALL
SELECT 'snapshot', id FROM snapshots
WHERE parent = :id AND (SELECT NOT hidden FROM snapshots WHERE id = :id)
LIMIT 1;

-- name: pass_children_on
UPDATE snapshots SET parent = (SELECT parent FROM snapshots WHERE id = :id) WHERE parent = :id;

-- name: delete_snapshot
DELETE FROM snapshots WHERE id = :id RETURNING id;

-- name: removable_snapshots
-- The last condition keeps the newest durable one before a head that is not durable yet: without
-- it the object store would have nothing of the session in between.
WITH candidates (id) AS (
    SELECT id FROM snapshots WHERE hidden
    UNION
    SELECT snapshots.id FROM sessions JOIN snapshots ON snapshots.session = sessions.id
    WHERE sessions.state = 'deleted'
        AND NOT EXISTS (SELECT 1 FROM snapshots AS child WHERE child.parent = snapshots.id))
SELECT {snapshot} FROM snapshots
WHERE id IN (SELECT id FROM candidates)
    AND (CAST(:holder AS TEXT) IS NULL OR EXISTS (
        SELECT 1 FROM sessions
        WHERE sessions.id = snapshots.session AND (holder = :holder OR holder IS NULL)))
    AND NOT EXISTS (
        SELECT 1 FROM sessions WHERE sessions.head = snapshots.id AND sessions.state <> 'deleted')
    AND (durable_at IS NULL OR NOT EXISTS (
        WITH RECURSIVE later (id) AS (
            SELECT child.id FROM snapshots AS child
            WHERE child.parent = snapshots.id AND child.durable_at IS NULL
            UNION ALL
            SELECT child.id FROM later JOIN snapshots AS child ON child.parent = later.id
            WHERE child.durable_at IS NULL)
        SELECT 1 FROM later JOIN sessions ON sessions.head = later.id
        WHERE sessions.state <> 'deleted'))
ORDER BY created_at, id;

-- name: anchored_snapshots
SELECT id FROM snapshots
WHERE session = :session AND EXISTS (
    SELECT 1 FROM sessions
    WHERE (sessions.head = snapshots.id OR sessions.forked_from = snapshots.id)
        AND sessions.state <> 'deleted');

-- name: references
-- The lists of layers are taken apart by the caller, which is several times faster.
SELECT layers, image FROM snapshots;
