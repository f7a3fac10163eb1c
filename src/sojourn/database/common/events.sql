-- name: append_event
-- Counted on from the session's last one; no row comes back when there is no such session.
INSERT INTO events ({event})
SELECT :session,
    coalesce((SELECT max(sequence) FROM events WHERE session = :session), 0) + 1,
    :at, :actor, :kind, :result, :details, :before, :after, :operation
FROM sessions WHERE id = :session
RETURNING sequence;

-- name: link_event
UPDATE events SET before = coalesce(:before, before), after = coalesce(:after, after)
WHERE session = :session AND sequence = :sequence
RETURNING sequence;
