-- name: put_secret
INSERT INTO secrets ({secret}) VALUES ({:secret})
ON CONFLICT (tenant, name) DO UPDATE
SET value = excluded.value, uses = excluded.uses, updated_at = excluded.updated_at
RETURNING {secret};

-- name: list_secrets
SELECT {secret} FROM secrets WHERE tenant = :tenant ORDER BY name;

-- name: delete_secret
DELETE FROM secrets WHERE tenant = :tenant AND name = :name RETURNING name;

-- name: anything_sealed
SELECT EXISTS (SELECT 1 FROM secrets) OR EXISTS (SELECT 1 FROM exposed_ports WHERE token <> '');
