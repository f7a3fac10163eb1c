-- name: forget_removals
DELETE FROM store_removals WHERE id IN (
    SELECT CAST(value AS bigint) FROM json_array_elements_text(CAST(:ids AS json)));
