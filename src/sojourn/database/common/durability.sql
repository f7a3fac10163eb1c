-- name: undurable_heads
SELECT {snapshot} FROM snapshots
WHERE durable_at IS NULL AND (CAST(:node AS TEXT) IS NULL OR node = :node)
    AND EXISTS (SELECT 1 FROM sessions WHERE head = snapshots.id AND state <> 'deleted')
ORDER BY created_at, id LIMIT :limit;

-- name: undurable_others
SELECT {snapshot} FROM snapshots
WHERE durable_at IS NULL AND NOT hidden AND (CAST(:node AS TEXT) IS NULL OR node = :node)
    AND EXISTS (SELECT 1 FROM sessions WHERE id = snapshots.session AND state <> 'deleted')
    AND NOT EXISTS (SELECT 1 FROM sessions WHERE head = snapshots.id AND state <> 'deleted')
ORDER BY created_at, id LIMIT :limit;

-- name: mark_durable
-- Only what the object store was given: a snapshot that was thinned meanwhile is not that one.
UPDATE snapshots SET durable_at = :at WHERE id = :id AND fingerprint = :fingerprint
RETURNING id;

-- name: store_removals
SELECT id, kind, tenant, object FROM store_removals ORDER BY id LIMIT :limit;

-- name: durable_objects
SELECT layers, image, tenant FROM snapshots WHERE durable_at IS NOT NULL;

-- name: record_digest
SELECT digest FROM store_records WHERE session = :session;

-- name: note_record
INSERT INTO store_records (session, digest)
SELECT id, :digest FROM sessions WHERE id = :session
ON CONFLICT (session) DO UPDATE SET digest = excluded.digest
RETURNING session;

-- name: durability
-- A session's own visible snapshots are needed, and its head, which may be hidden or another's.
-- Where only those are asked for that wait, they are found by what they wait for; what a holder's
-- wait for is on its disk.
WITH behind (id) AS (
    SELECT session FROM snapshots
    WHERE :waiting AND durable_at IS NULL AND NOT hidden
        AND (CAST(:holder AS TEXT) IS NULL OR node = :holder)
    UNION
    SELECT sessions.id FROM snapshots JOIN sessions ON sessions.head = snapshots.id
    WHERE :waiting AND durable_at IS NULL
        AND (CAST(:holder AS TEXT) IS NULL OR snapshots.node = :holder)),
wanted (id) AS (
    SELECT id FROM sessions WHERE NOT :waiting
    UNION ALL
    SELECT id FROM behind)
SELECT sessions.id, sessions.head, head.durable_at IS NOT NULL,
    (SELECT count(*) FROM snapshots
        WHERE session = sessions.id AND durable_at IS NULL AND NOT hidden)
        + CASE WHEN head.id IS NOT NULL AND head.durable_at IS NULL
            AND (head.hidden OR head.session <> sessions.id) THEN 1 ELSE 0 END,
    (SELECT min(created_at) FROM snapshots
        WHERE session = sessions.id AND durable_at IS NULL AND NOT hidden),
    CASE WHEN head.durable_at IS NULL THEN head.created_at END,
    (WITH RECURSIVE line (id, parent, created_at, durable_at) AS (
        SELECT head.id, head.parent, head.created_at, head.durable_at
        UNION ALL
        SELECT before.id, before.parent, before.created_at, before.durable_at
        FROM line JOIN snapshots AS before ON before.id = line.parent
        WHERE line.durable_at IS NULL)
    SELECT created_at FROM line WHERE durable_at IS NOT NULL)
FROM wanted JOIN sessions ON sessions.id = wanted.id
LEFT JOIN snapshots AS head ON head.id = sessions.head
WHERE sessions.state <> 'deleted' AND (CAST(:tenant AS TEXT) IS NULL OR sessions.tenant = :tenant)
    AND (CAST(:session AS TEXT) IS NULL OR sessions.id = :session)
    AND {held}
    AND (head.id IS NOT NULL OR EXISTS (
        SELECT 1 FROM snapshots WHERE session = sessions.id AND NOT hidden))
ORDER BY sessions.created_at, sessions.id;

-- name: forget_durable
UPDATE snapshots SET durable_at = NULL WHERE durable_at IS NOT NULL;

-- name: forget_records
DELETE FROM store_records;

-- name: forget_all_removals
DELETE FROM store_removals;
