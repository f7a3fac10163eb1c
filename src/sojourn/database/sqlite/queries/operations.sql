-- name: operation_to_step
SELECT {operation} FROM operations WHERE id = :id;

-- name: set_step
UPDATE operations
SET state = 'running', step = :step, data = :data, updated_at = :now,
    server = coalesce(:server, server),
    step_number = step_number + (step IS NOT :step)
WHERE id = :id AND state IN ('pending', 'running')
RETURNING {operation};

-- name: claim_operations
UPDATE operations SET server = :server, updated_at = :now
WHERE id IN (
    SELECT id FROM operations
    WHERE state IN ('pending', 'running') AND updated_at < :before AND server <> :server
    ORDER BY created_at, id LIMIT :limit)
RETURNING {operation};

-- name: prune_operations
DELETE FROM operations WHERE id IN (
    SELECT id FROM operations
    WHERE finished_at < :before AND state NOT IN ('pending', 'running')
        AND NOT EXISTS (SELECT 1 FROM idempotency WHERE idempotency.operation = operations.id)
    ORDER BY finished_at LIMIT :limit);

-- name: prune_keys
DELETE FROM idempotency WHERE (tenant, key) IN (
    SELECT tenant, key FROM idempotency
    WHERE expires_at <= :now AND NOT EXISTS (
        SELECT 1 FROM operations
        WHERE operations.id = idempotency.operation AND state IN ('pending', 'running'))
    ORDER BY expires_at LIMIT :limit);
