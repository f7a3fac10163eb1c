-- name: forget_removals
DELETE FROM store_removals WHERE id IN (SELECT value FROM json_each(:ids));
