-- name: node_row
-- How long a lease is valid is told by the clock that it was given by.
SELECT {node} FROM (
    SELECT *, coalesce(lease_until - {clock}, 0.0) AS lease_left FROM nodes) AS known
WHERE id = :id;

-- name: find_node
SELECT {node} FROM (
    SELECT *, coalesce(lease_until - {clock}, 0.0) AS lease_left FROM nodes) AS known
WHERE state <> 'removed' AND (id = :key OR name = :key) ORDER BY id = :key DESC LIMIT 1;

-- name: list_nodes
SELECT {node} FROM (
    SELECT *, coalesce(lease_until - {clock}, 0.0) AS lease_left FROM nodes) AS known
WHERE state <> 'removed' ORDER BY name;

-- name: insert_node
INSERT INTO nodes (id, name, address, state, incarnation, lost, labels, taints, capacity, used,
    cpu, version, joined_at)
VALUES (:id, :name, :address, 'ready', 0, FALSE, :labels, :taints, '{}', '{}', '[]', '', {clock});

-- name: insert_fence
INSERT INTO node_fences (node, incarnation) VALUES (:node, 0);

-- name: start_node
UPDATE nodes SET incarnation = incarnation + 1, lost = FALSE, lease_until = {clock} + :lease,
    seen_at = {clock}, address = :address, labels = coalesce(:labels, labels),
    taints = coalesce(:taints, taints), capacity = :capacity, used = '{}', runtime = :runtime,
    cpu = :cpu, version = :version
WHERE id = :id AND state <> 'removed'
RETURNING incarnation;

-- name: mark_lost
UPDATE nodes SET incarnation = incarnation + 1, lost = TRUE WHERE id = :id RETURNING incarnation;

-- name: set_fence
UPDATE node_fences SET incarnation = :incarnation WHERE node = :node;

-- name: renew_node
-- The node's own row says whether it is fenced: it is changed together with the fence, and one that
-- was waited for is read anew.
UPDATE nodes SET lease_until = {clock} + :lease, seen_at = {clock}, used = coalesce(:used, used)
WHERE id = :id AND incarnation = :incarnation AND NOT lost
RETURNING id;

-- name: stop_node
UPDATE nodes SET lease_until = {clock}
WHERE id = :id AND incarnation = :incarnation AND NOT lost
RETURNING id;

-- name: set_node_state
UPDATE nodes SET state = :state WHERE id = :id AND state <> 'removed' RETURNING id;

-- name: nodes_to_lose
-- Whether there may be one: asked every second, and seldom so.
SELECT id FROM nodes
WHERE (NOT lost AND state <> 'removed' AND lease_until < {clock} - :grace)
    OR (lost AND (
        EXISTS (SELECT 1 FROM sessions WHERE holder = nodes.id)
        OR EXISTS (
            SELECT 1 FROM operations
            WHERE server = nodes.id AND state IN ('pending', 'running'))))
LIMIT 1;

-- name: lost_node_with_work
SELECT id FROM nodes
WHERE lost AND (
    EXISTS (SELECT 1 FROM sessions WHERE holder = nodes.id)
    OR EXISTS (
        SELECT 1 FROM operations WHERE server = nodes.id AND state IN ('pending', 'running')))
ORDER BY lease_until LIMIT 1;

-- name: insert_node_token
INSERT INTO node_tokens (id, digest, expires_at, labels)
VALUES (:id, :digest, :expires_at, :labels);

-- name: use_node_token
UPDATE node_tokens SET used_at = {clock}
WHERE id = :id AND digest = :digest AND used_at IS NULL AND expires_at > {clock}
RETURNING labels;

-- name: prune_node_tokens
DELETE FROM node_tokens WHERE expires_at < {clock} - 86400.0;

-- name: cluster_value
SELECT value FROM cluster_values WHERE name = :name;

-- name: replace_cluster_value
INSERT INTO cluster_values (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: put_cluster_value
INSERT INTO cluster_values (name, value) VALUES (:name, :value) ON CONFLICT (name) DO NOTHING;

-- name: hold_duty
INSERT INTO duties (name, node, lease_until) VALUES (:name, :node, {clock} + :lease)
ON CONFLICT (name) DO UPDATE SET node = excluded.node, lease_until = excluded.lease_until
WHERE duties.node = excluded.node OR duties.lease_until < {clock}
RETURNING node;

-- name: take_session
UPDATE sessions SET holder = :holder, epoch = epoch + 1, updated_at = :now
WHERE id = :id AND holder IS NULL AND epoch = :epoch AND state IN ('suspended', 'failed')
RETURNING {session};

-- name: release_session
UPDATE sessions SET holder = NULL, epoch = epoch + 1, updated_at = :now
WHERE id = :id AND holder = :holder AND epoch = :epoch AND state IN ('suspended', 'failed')
RETURNING {session};

-- name: operations_of_session
SELECT {operation} FROM operations
WHERE server = :server AND session = :session AND state IN ('pending', 'running');

-- name: move_lost_session
UPDATE sessions SET state = :state, head = :head, cause = :cause, holder = NULL, sandbox = NULL,
    node = NULL, idle_deadline = NULL, lifetime_deadline = :lifetime_deadline, epoch = epoch + 1,
    updated_at = :now
WHERE id = :id;

-- name: references_held
-- What a node must keep: all of the sessions it holds, their heads, which may be another session's,
-- and what nobody else has.
SELECT layers, image FROM snapshots
WHERE session IN (SELECT id FROM sessions WHERE holder = :holder)
UNION ALL
SELECT layers, image FROM snapshots
WHERE id IN (SELECT head FROM sessions WHERE holder = :holder AND head IS NOT NULL)
UNION ALL
SELECT layers, image FROM snapshots WHERE node = :holder AND durable_at IS NULL;

-- name: durable_objects_held
SELECT layers, image, tenant FROM snapshots
WHERE durable_at IS NOT NULL AND session IN (SELECT id FROM sessions WHERE holder = :holder)
UNION ALL
SELECT layers, image, tenant FROM snapshots
WHERE durable_at IS NOT NULL
    AND id IN (SELECT head FROM sessions WHERE holder = :holder AND head IS NOT NULL);
