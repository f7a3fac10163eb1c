-- name: insert_port
INSERT INTO exposed_ports ({port}) VALUES ({:port}) ON CONFLICT DO NOTHING RETURNING {port};

-- name: live_session
SELECT id FROM sessions WHERE id = :session AND state <> 'deleted';

-- name: find_port
SELECT {port} FROM exposed_ports WHERE session = :session AND port = :port;

-- name: list_ports
SELECT {port} FROM exposed_ports
WHERE CAST(:session AS TEXT) IS NULL OR session = :session
ORDER BY session, port;

-- name: ports_held
SELECT {port} FROM exposed_ports
WHERE session IN (SELECT id FROM sessions WHERE holder = :holder)
    AND (CAST(:session AS TEXT) IS NULL OR session = :session)
ORDER BY session, port;

-- name: delete_port
DELETE FROM exposed_ports WHERE session = :session AND port = :port RETURNING port;
