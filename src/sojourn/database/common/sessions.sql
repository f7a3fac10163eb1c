-- name: insert_session
INSERT INTO sessions ({session}) VALUES ({:session});

-- name: session_row
SELECT {session} FROM sessions WHERE id = :id;

-- name: find_session
SELECT {session} FROM sessions
WHERE id = :key AND state <> 'deleted' AND (CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant);

-- name: find_session_by_name
SELECT {session} FROM sessions
WHERE name = :key AND state <> 'deleted' AND tenant = :tenant AND kind = 'session';

-- name: find_template
SELECT {session} FROM sessions
WHERE name = :key AND state <> 'deleted' AND tenant = :tenant AND kind = 'template';

-- name: find_sessions_by_name_of_any_tenant
SELECT {session} FROM sessions
WHERE name = :key AND state <> 'deleted' AND kind = 'session' LIMIT 2;

-- name: count_sessions
SELECT state, count(*) FROM sessions
WHERE (CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant) AND kind = 'session' AND {held}
GROUP BY state;
