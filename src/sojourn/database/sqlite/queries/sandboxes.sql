-- name: put_sandbox
INSERT INTO sandboxes ({sandbox}) VALUES ({:sandbox})
ON CONFLICT (id) DO UPDATE SET
    epoch = excluded.epoch, node = excluded.node, driver = excluded.driver,
    directory = excluded.directory, spec = excluded.spec, state = excluded.state
WHERE sandboxes.session = excluded.session;

-- name: session_epoch
SELECT epoch FROM sessions WHERE id = :session AND state <> 'deleted';

-- name: set_sandbox_state
UPDATE sandboxes SET state = :state WHERE id = :id RETURNING id;

-- name: delete_sandbox
DELETE FROM sandboxes WHERE id = :id RETURNING id;

-- name: get_sandbox
SELECT {sandbox} FROM sandboxes WHERE id = :id;

-- name: list_sandboxes
SELECT {sandbox} FROM sandboxes
WHERE (:node IS NULL OR node = :node) AND (:session IS NULL OR session = :session)
ORDER BY created_at, id;
