-- name: open_transaction
-- Its mark, how durable it is, and the sessions it changes, locked in one order. What is read from
-- here on was committed by whoever held them before.
WITH mark AS (
    INSERT INTO commits (id)
    SELECT CAST(:commit AS text) FROM set_config('synchronous_commit', :level, TRUE))
SELECT id FROM sessions WHERE id = ANY (:sessions) ORDER BY id FOR NO KEY UPDATE;

-- name: open_fenced_transaction
-- The same, and before it the fence of the node, whose row whoever fences it must change. A row that
-- was waited for is read anew: where the node was fenced meanwhile, it is not found.
WITH fence AS (
    SELECT node FROM node_fences WHERE node = :node AND incarnation = :incarnation FOR SHARE),
mark AS (
    INSERT INTO commits (id)
    SELECT CAST(:commit AS text) FROM set_config('synchronous_commit', :level, TRUE)),
locked AS (
    SELECT id FROM sessions WHERE id = ANY (:sessions) AND EXISTS (SELECT 1 FROM fence)
    ORDER BY id FOR NO KEY UPDATE)
SELECT (SELECT count(*) FROM fence), (SELECT count(*) FROM locked);

-- name: lock_snapshots
SELECT id FROM snapshots WHERE id = ANY (:snapshots) ORDER BY id FOR UPDATE;

-- name: settle_commit
-- A row comes back when the transaction of that mark was not committed; now it never will be.
INSERT INTO commits (id) VALUES (:commit) ON CONFLICT DO NOTHING RETURNING id;

-- name: forget_commits
DELETE FROM commits WHERE id < :before;

-- name: announce
SELECT pg_notify('sojourn_events', :payload);

-- name: hint
SELECT pg_notify(:channel, :payload);
