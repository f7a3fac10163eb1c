-- name: insert_tenant
INSERT INTO tenants ({tenant}) VALUES ({:tenant});

-- name: find_tenant
SELECT {tenant} FROM tenants WHERE id = :key OR name = :key ORDER BY id = :key DESC LIMIT 1;

-- name: list_tenants
SELECT {tenant} FROM tenants ORDER BY created_at, id;

-- name: insert_token
INSERT INTO tokens ({token}, hash) VALUES ({:token}, :hash);

-- name: token_by_hash
SELECT {token} FROM tokens WHERE hash = :hash;

-- name: stored_hash
SELECT hash FROM tokens WHERE id = :id;

-- name: revoke_token
UPDATE tokens SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL RETURNING id;

-- name: list_tokens
SELECT {token} FROM tokens WHERE CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant ORDER BY created_at, id;

-- name: get_setting
SELECT value FROM settings WHERE key = :key;

-- name: set_setting_once
INSERT INTO settings (key, value) VALUES (:key, :value) ON CONFLICT (key) DO NOTHING;

-- name: set_setting
INSERT INTO settings (key, value) VALUES (:key, :value)
ON CONFLICT (key) DO UPDATE SET value = excluded.value;
