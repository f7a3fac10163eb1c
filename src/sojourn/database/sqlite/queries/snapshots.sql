-- name: insert_snapshot
INSERT INTO snapshots ({snapshot}) VALUES ({:snapshot});

-- name: snapshot_row
SELECT {snapshot} FROM snapshots WHERE id = :id;

-- name: find_snapshot
SELECT {snapshot} FROM snapshots
WHERE id = :id AND (:tenant IS NULL OR tenant = :tenant) AND (:hidden OR NOT hidden);

-- name: list_snapshots
SELECT {snapshot} FROM snapshots
WHERE session = :session AND NOT hidden ORDER BY created_at, id;

-- name: update_snapshot
UPDATE snapshots SET {assignments} WHERE id = :where_id RETURNING {snapshot};

-- name: snapshot_users
-- Who keeps a snapshot from being deleted.
SELECT 'snapshot', id FROM snapshots WHERE parent = :id
UNION ALL
SELECT 'session', id FROM sessions WHERE head = :id AND state <> 'deleted'
LIMIT 1;

-- name: delete_snapshot
DELETE FROM snapshots WHERE id = :id;

-- name: removable_snapshots
SELECT {snapshot} FROM snapshots
WHERE (hidden OR session IN (SELECT id FROM sessions WHERE state = 'deleted'))
    AND NOT EXISTS (SELECT 1 FROM snapshots AS child WHERE child.parent = snapshots.id)
    AND NOT EXISTS (
        SELECT 1 FROM sessions WHERE sessions.head = snapshots.id AND sessions.state <> 'deleted')
ORDER BY created_at, id;

-- name: layer_references
SELECT DISTINCT layer.value FROM snapshots, json_each(snapshots.layers) AS layer;

-- name: image_references
SELECT DISTINCT image FROM snapshots WHERE image IS NOT NULL;
