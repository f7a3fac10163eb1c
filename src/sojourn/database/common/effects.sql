-- name: put_effect
-- No row comes back when there is no such session. Where it is known already only its end is new.
INSERT INTO effects (id, session, began_at, outcome, lasting, pending, snapshot, effect)
SELECT :id, id, :began_at, :outcome, :lasting, TRUE, head, :effect FROM sessions WHERE id = :session
ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome, effect = excluded.effect
RETURNING snapshot;

-- name: link_effects
INSERT INTO snapshot_effects (snapshot, effect)
SELECT :snapshot, id FROM effects WHERE session = :session AND pending AND began_at <= :until
ON CONFLICT DO NOTHING;

-- name: settle_effects
UPDATE effects SET pending = FALSE WHERE session = :session AND pending AND began_at <= :until;

-- name: list_effects
SELECT effect, snapshot, lasting, 0 FROM effects
WHERE session = :session AND (began_at, id) > (:after_time, :after_id) AND (:all OR lasting)
ORDER BY began_at, id LIMIT :limit;

-- name: open_effects
SELECT effect, snapshot, lasting, 0 FROM effects
WHERE outcome = 'open' AND (CAST(:holder AS TEXT) IS NULL OR EXISTS (
    SELECT 1 FROM sessions WHERE sessions.id = effects.session AND holder = :holder))
ORDER BY began_at, id LIMIT :limit;

-- name: effects_between
-- Those before snapshots that lead to `tip` and not to `base`, and with `session` what it did since
-- its last snapshot. The empty text keeps planners from trying every snapshot for each effect.
WITH RECURSIVE line (id, parent) AS (
    SELECT id, parent FROM snapshots WHERE id = :tip
    UNION ALL
    SELECT snapshots.id, snapshots.parent FROM line JOIN snapshots ON snapshots.id = line.parent
    WHERE line.id <> :base),
kept (id, parent) AS (
    SELECT id, parent FROM snapshots WHERE id = :base
    UNION ALL
    SELECT snapshots.id, snapshots.parent FROM kept JOIN snapshots ON snapshots.id = kept.parent),
found (id) AS (
    SELECT effect FROM snapshot_effects
    WHERE snapshot IN (SELECT id FROM line EXCEPT SELECT id FROM kept)
        AND NOT EXISTS (
            SELECT 1 FROM snapshot_effects AS before
            WHERE before.effect = snapshot_effects.effect
                AND before.snapshot || '' IN (SELECT id FROM kept))
    UNION
    SELECT id FROM effects WHERE session = :session AND pending)
SELECT effect, snapshot, lasting, count(*) OVER () FROM effects
WHERE id IN (SELECT id FROM found) AND lasting
ORDER BY began_at, id LIMIT :limit;
