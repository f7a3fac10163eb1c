-- name: insert_operation
INSERT INTO operations ({operation}) VALUES ({:operation});

-- name: operation_row
SELECT {operation} FROM operations WHERE id = :id;

-- name: find_operation
SELECT {operation} FROM operations WHERE id = :id AND (CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant);

-- name: exclusive_operation
SELECT {operation} FROM operations
WHERE session = :session AND exclusive AND state IN ('pending', 'running');

-- name: finish_operation
UPDATE operations
SET state = :state, result = :result, error = :error, updated_at = :now, finished_at = :now
WHERE id = :id AND state IN ('pending', 'running')
RETURNING {operation};

-- name: unfinished_operations
SELECT {operation} FROM operations
WHERE state IN ('pending', 'running') AND (CAST(:server AS TEXT) IS NULL OR server = :server)
ORDER BY created_at, id;

-- name: find_key
SELECT digest, operation, expires_at FROM idempotency WHERE tenant = :tenant AND key = :key;

-- name: keyed_operation
SELECT {operation} FROM operations WHERE id = (
    SELECT operation FROM idempotency WHERE tenant = :tenant AND key = :key AND expires_at > :now
);

-- name: insert_key
INSERT INTO idempotency (tenant, key, digest, operation, expires_at)
VALUES (:tenant, :key, :digest, :operation, :expires_at);

-- name: delete_key
DELETE FROM idempotency WHERE tenant = :tenant AND key = :key;
