-- name: late_node
SELECT id FROM nodes
WHERE NOT lost AND state <> 'removed' AND lease_until < {clock} - :grace
ORDER BY lease_until LIMIT 1
FOR UPDATE SKIP LOCKED;

-- name: lost_node
-- It does not start again while its sessions are taken from it.
SELECT name, lease_until, {clock} FROM nodes WHERE id = :id AND lost FOR SHARE;

-- name: sessions_of_lost_node
-- In the order of their index: the live ones come before the suspended ones.
SELECT {session} FROM sessions WHERE holder = :node
ORDER BY holder, state LIMIT :limit
FOR UPDATE SKIP LOCKED;

-- name: operations_of_lost_node
SELECT {operation} FROM operations
WHERE server = :node AND state IN ('pending', 'running')
    AND (CAST(:sessions AS text) IS NULL OR session IN (
        SELECT value FROM json_array_elements_text(CAST(:sessions AS json))))
ORDER BY created_at, id LIMIT :limit
FOR UPDATE SKIP LOCKED;

-- name: effects_of_lost_sessions
SELECT effect FROM effects
WHERE outcome = 'open' AND session IN (
    SELECT value FROM json_array_elements_text(CAST(:sessions AS json)));

-- name: durable_lines
-- The newest snapshot on the line of each session's head that the object store has, and how many
-- come after it: read no further than there. Of a line it has nothing of the oldest one comes.
WITH RECURSIVE line (session, id, parent, created_at, durable_at, passed, head_at) AS (
    SELECT sessions.id, head.id, head.parent, head.created_at, head.durable_at, 0, head.created_at
    FROM sessions JOIN snapshots AS head ON head.id = sessions.head
    WHERE sessions.id = ANY (
        ARRAY (SELECT value FROM json_array_elements_text(CAST(:sessions AS json))))
    UNION ALL
    SELECT line.session, before.id, before.parent, before.created_at, before.durable_at, passed + 1,
        head_at
    FROM line JOIN snapshots AS before ON before.id = line.parent
    WHERE line.durable_at IS NULL)
SELECT DISTINCT ON (session) session, CASE WHEN durable_at IS NOT NULL THEN id END, created_at,
    passed + CASE WHEN durable_at IS NULL THEN 1 ELSE 0 END, head_at
FROM line ORDER BY session, passed DESC;
