-- name: operation_to_step
SELECT {operation} FROM operations WHERE id = :id;

-- name: set_step
UPDATE operations
SET state = 'running', step = :step, data = :data, updated_at = :now,
    step_number = step_number + (step IS NOT :step)
WHERE id = :id AND state IN ('pending', 'running')
RETURNING {operation};
