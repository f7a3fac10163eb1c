-- Sessions by their labels and, under the name that no label has, their tenant: what a tenant finds
-- by a label takes as long as it has such sessions, whatever labels others use.
DROP INDEX sessions_by_label;
CREATE INDEX sessions_by_label ON sessions
    USING gin ((labels || jsonb_object(ARRAY['', tenant])) jsonb_path_ops)
    WHERE labels <> '{}';
