-- name: update_session
-- The compare-and-swap: the only statement that changes a session's state.
UPDATE sessions SET {assignments}
WHERE id = :where_id AND epoch = :expect_epoch AND state <> 'deleted'
    AND state IN (SELECT value FROM json_each(:expect_state))
RETURNING {session};

-- name: list_sessions
SELECT {session} FROM sessions
WHERE (:tenant IS NULL OR tenant = :tenant)
    AND (:kind IS NULL OR kind = :kind)
    AND {held}
    AND state IN (SELECT value FROM json_each(:states))
    AND (:after_time IS NULL OR (created_at, id) < (:after_time, :after_id))
ORDER BY created_at DESC, id DESC
LIMIT :limit;

-- name: list_labelled_sessions
SELECT {session} FROM sessions
WHERE (:tenant IS NULL OR tenant = :tenant)
    AND (:kind IS NULL OR kind = :kind)
    AND {held}
    AND state IN (SELECT value FROM json_each(:states))
    AND (:after_time IS NULL OR (created_at, id) < (:after_time, :after_id))
    AND NOT EXISTS (
        SELECT 1 FROM json_each(:labels) AS wanted
        WHERE NOT EXISTS (
            SELECT 1 FROM json_each(sessions.labels) AS present
            WHERE present.key = wanted.key AND present.value = wanted.value
        )
    )
ORDER BY created_at DESC, id DESC
LIMIT :limit;

-- name: touch_idle
UPDATE sessions SET idle_deadline = max(idle_deadline, :deadline)
WHERE id = :id AND idle_deadline IS NOT NULL AND state <> 'deleted';

-- name: due_sessions
-- The plus signs keep the planner to the index of lifetimes: most sessions are suspended.
SELECT {session} FROM sessions
WHERE {held} AND ((state IN ('running', 'paused') AND min(
        coalesce(idle_deadline, 9e999), coalesce(lifetime_deadline, 9e999)) <= :now)
    OR (+state IN ('suspended', 'failed') AND lifetime_deadline <= :now
        AND json_extract(policy, '$.on_expiry') = 'delete'))
ORDER BY min(coalesce(idle_deadline, 9e999), coalesce(lifetime_deadline, 9e999)), id
LIMIT :limit;

-- name: prune_sessions
DELETE FROM sessions WHERE id IN (
    SELECT id FROM sessions
    WHERE state = 'deleted' AND updated_at < :before
        AND NOT EXISTS (SELECT 1 FROM snapshots WHERE snapshots.session = sessions.id)
        AND NOT EXISTS (
            SELECT 1 FROM operations WHERE operations.session = sessions.id
                AND (operations.state IN ('pending', 'running') OR EXISTS (
                    SELECT 1 FROM idempotency WHERE idempotency.operation = operations.id
                        AND idempotency.expires_at > :now)))
    ORDER BY updated_at LIMIT :limit);
