-- name: open_transaction
-- Its mark, how durable it is, and the sessions it changes, locked in one order. What is read from
-- here on was committed by whoever held them before.
WITH mark AS (
    INSERT INTO commits (id)
    SELECT CAST(:commit AS text) FROM set_config('synchronous_commit', :level, TRUE))
SELECT id FROM sessions WHERE id = ANY (:sessions) ORDER BY id FOR NO KEY UPDATE;

-- name: lock_snapshots
SELECT id FROM snapshots WHERE id = ANY (:snapshots) ORDER BY id FOR UPDATE;

-- name: settle_commit
-- A row comes back when the transaction of that mark was not committed; now it never will be.
INSERT INTO commits (id) VALUES (:commit) ON CONFLICT DO NOTHING RETURNING id;

-- name: forget_commits
DELETE FROM commits WHERE id < :before;

-- name: announce
SELECT pg_notify('sojourn_events', :payload);
