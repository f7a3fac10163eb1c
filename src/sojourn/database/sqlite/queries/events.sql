-- name: list_events
SELECT {event} FROM events
WHERE session = :session AND sequence > :after
    AND (:kinds IS NULL OR kind IN (SELECT value FROM json_each(:kinds)))
ORDER BY sequence LIMIT :limit;
