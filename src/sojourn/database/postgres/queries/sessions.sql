-- name: update_session
-- The compare-and-swap: the only statement that changes a session's state.
UPDATE sessions SET {assignments}
WHERE id = :where_id AND epoch = :expect_epoch AND state <> 'deleted'
    AND state IN (SELECT value FROM json_array_elements_text(CAST(:expect_state AS json)))
RETURNING {session};

-- name: list_sessions
-- A page of each state by its index, then the first of them all: the time of a page depends
-- neither on how many sessions there are nor on how rare the wanted state is.
SELECT {session} FROM json_array_elements_text(CAST(:states AS json)) AS wanted (value)
CROSS JOIN LATERAL (
    SELECT * FROM sessions
    WHERE state = wanted.value
        AND (CAST(:tenant AS text) IS NULL OR tenant = :tenant)
        AND (CAST(:kind AS text) IS NULL OR kind = :kind)
        AND {held}
        AND (CAST(:after_time AS double precision) IS NULL
            OR (created_at, id) < (:after_time, CAST(:after_id AS text)))
    ORDER BY created_at DESC, id DESC
    LIMIT :limit
) AS found
ORDER BY created_at DESC, id DESC
LIMIT :limit;

-- name: list_labelled_sessions
-- Of each state the newest 500 are looked at: where they fill the page, or there are no more, how
-- many others have the label does not matter. Otherwise it is rare, and found by the index of
-- labels, which knows them together with their tenant.
SELECT {session} FROM json_array_elements_text(CAST(:states AS json)) AS wanted (value)
CROSS JOIN LATERAL (
    WITH recent AS MATERIALIZED (
        SELECT id, created_at, labels @> CAST(:labels AS jsonb) AS fits FROM sessions
        WHERE state = wanted.value
            AND (CAST(:tenant AS text) IS NULL OR tenant = :tenant)
            AND (CAST(:kind AS text) IS NULL OR kind = :kind)
            AND {held}
            AND (CAST(:after_time AS double precision) IS NULL
                OR (created_at, id) < (:after_time, CAST(:after_id AS text)))
        ORDER BY created_at DESC, id DESC
        LIMIT 500),
    enough AS (
        SELECT count(*) FILTER (WHERE fits) >= :limit OR count(*) < 500 AS yes FROM recent)
    SELECT one.* FROM (
        SELECT id FROM recent WHERE fits AND (SELECT yes FROM enough)
        ORDER BY created_at DESC, id DESC LIMIT :limit) AS fitting
    CROSS JOIN LATERAL (SELECT * FROM sessions WHERE sessions.id = fitting.id LIMIT 1) AS one
    UNION ALL
    (SELECT * FROM sessions
        WHERE NOT (SELECT yes FROM enough) AND state = wanted.value
            AND (CAST(:tenant AS text) IS NULL OR tenant = :tenant)
            AND (CAST(:kind AS text) IS NULL OR kind = :kind)
            AND {held}
            AND (CAST(:after_time AS double precision) IS NULL
                OR (created_at, id) < (:after_time, CAST(:after_id AS text)))
            AND labels <> '{}'
            AND (labels || jsonb_object(ARRAY['', tenant])) @> (CAST(:labels AS jsonb)
                || CASE WHEN CAST(:tenant AS text) IS NULL THEN '{}'
                    ELSE jsonb_object(ARRAY['', CAST(:tenant AS text)]) END)
            AND labels @> CAST(:labels AS jsonb)
        ORDER BY created_at DESC, id DESC
        LIMIT :limit)
) AS found
ORDER BY created_at DESC, id DESC
LIMIT :limit;

-- name: touch_idle
UPDATE sessions SET idle_deadline = greatest(idle_deadline, :deadline)
WHERE id = :id AND idle_deadline IS NOT NULL AND state <> 'deleted';

-- name: due_sessions
-- Each half has an index of its own: most sessions are suspended.
SELECT {session} FROM (
    (SELECT * FROM sessions
        WHERE state IN ('running', 'paused') AND least(idle_deadline, lifetime_deadline) <= :now
            AND {held}
        ORDER BY least(idle_deadline, lifetime_deadline), id LIMIT :limit)
    UNION ALL
    (SELECT * FROM sessions
        WHERE state IN ('suspended', 'failed') AND (policy ->> 'on_expiry') = 'delete'
            AND lifetime_deadline <= :now AND {held}
        ORDER BY lifetime_deadline, id LIMIT :limit)
) AS due
ORDER BY least(idle_deadline, lifetime_deadline), id
LIMIT :limit;

-- name: prune_sessions
-- Its operations go with it by name; one that was begun meanwhile stops it.
WITH gone (id) AS (
    SELECT id FROM sessions
    WHERE state = 'deleted' AND updated_at < :before
        AND NOT EXISTS (SELECT 1 FROM snapshots WHERE snapshots.session = sessions.id)
        AND NOT EXISTS (
            SELECT 1 FROM operations WHERE operations.session = sessions.id
                AND (operations.state IN ('pending', 'running') OR EXISTS (
                    SELECT 1 FROM idempotency WHERE idempotency.operation = operations.id
                        AND idempotency.expires_at > :now)))
    ORDER BY updated_at LIMIT :limit
    FOR UPDATE SKIP LOCKED),
dropped AS (DELETE FROM operations WHERE session IN (SELECT id FROM gone))
DELETE FROM sessions WHERE id IN (SELECT id FROM gone);
