-- name: check_fence
SELECT 1 FROM node_fences WHERE node = :node AND incarnation = :incarnation;

-- name: late_node
SELECT id FROM nodes
WHERE NOT lost AND state <> 'removed' AND lease_until < {clock} - :grace
ORDER BY lease_until LIMIT 1;

-- name: lost_node
SELECT name, lease_until, {clock} FROM nodes WHERE id = :id AND lost;

-- name: sessions_of_lost_node
SELECT {session} FROM sessions WHERE holder = :node ORDER BY holder, state LIMIT :limit;

-- name: operations_of_lost_node
SELECT {operation} FROM operations
WHERE server = :node AND state IN ('pending', 'running')
    AND (:sessions IS NULL OR session IN (SELECT value FROM json_each(:sessions)))
ORDER BY created_at, id LIMIT :limit;

-- name: effects_of_lost_sessions
SELECT effect FROM effects
WHERE outcome = 'open' AND session IN (SELECT value FROM json_each(:sessions));

-- name: durable_lines
-- The newest snapshot on the line of each session's head that the object store has, and how many
-- come after it: read no further than there. Of a line it has nothing of the oldest one comes.
WITH RECURSIVE line (session, id, parent, created_at, durable_at, passed, head_at) AS (
    SELECT sessions.id, head.id, head.parent, head.created_at, head.durable_at, 0, head.created_at
    FROM sessions JOIN snapshots AS head ON head.id = sessions.head
    WHERE sessions.id IN (SELECT value FROM json_each(:sessions))
    UNION ALL
    SELECT line.session, before.id, before.parent, before.created_at, before.durable_at, passed + 1,
        head_at
    FROM line JOIN snapshots AS before ON before.id = line.parent
    WHERE line.durable_at IS NULL)
SELECT session, CASE WHEN durable_at IS NOT NULL THEN id END, created_at,
    max(passed) + (durable_at IS NULL), head_at
FROM line GROUP BY session;
