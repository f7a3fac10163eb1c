-- name: list_events
SELECT {event} FROM events
WHERE session = :session AND sequence > :after
    AND (CAST(:kinds AS text) IS NULL
        OR kind IN (SELECT value FROM json_array_elements_text(CAST(:kinds AS json))))
ORDER BY sequence LIMIT :limit;
