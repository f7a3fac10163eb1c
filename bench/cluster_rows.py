"""Rows of a cluster for the measure of its database: sessions with their snapshots, events and
operations, put straight into the tables, as large as the real ones are.

Most sessions are suspended, four fifths of them held by one of the nodes, with one to five
snapshots of six layers each in a line; the first ones run.
"""

from __future__ import annotations

from typing import Any

import psycopg

from sojourn.database.rows import SESSIONS, encode_json
from sojourn.model import Limits, Policy
from sojourn.model.network import NetworkPolicy

TENANTS = 100

# Ids look like real ones and sort by their number, which is also their age.
_SESSION = "'ses_' || lpad(n::text, 24, '0')"
_SNAPSHOT = "'snp_' || lpad((n * 8 + s)::text, 24, '0')"
_LAYER = "md5('{0}' || {1}) || md5('{0}/' || {1})"
_BASE = "md5('base') || md5('template')"
_LAYERS = f"""
json_build_array({_BASE}, {", ".join(_LAYER.format(f"l{i}", "n * 8 + s") for i in range(5))})
"""

_FILL = [
    f"""
    INSERT INTO sessions (id, tenant, name, labels, template, env, limits, policy, driver, state,
        epoch, head, sandbox, node, idle_deadline, created_at, updated_at, network, kind, holder)
    SELECT {_SESSION}, 'ten_' || n %% {TENANTS}, CASE WHEN n %% 4 = 0 THEN 'name-' || n END,
        jsonb_build_object('user', (n %% 1000)::text, 'team', (n %% 20)::text), 'debian',
        '{{"LANG": "C.UTF-8"}}', %(limits)s, %(policy)s, 'gvisor',
        CASE WHEN n <= %(running)s THEN 'running' ELSE 'suspended' END, 1 + n %% 9,
        'snp_' || lpad((n * 8 + 1 + n %% 5)::text, 24, '0'),
        CASE WHEN n <= %(running)s THEN 'sbx-' || lpad(n::text, 24, '0') END,
        CASE WHEN n <= %(running)s THEN 'nod_' || n %% %(nodes)s END,
        CASE WHEN n <= %(running)s THEN 4e9 END, %(time)s + n, %(time)s + n, %(network)s,
        'session',
        CASE WHEN n <= %(running)s OR n / %(nodes)s %% 5 > 0 THEN 'nod_' || n %% %(nodes)s END
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
    """,
    f"""
    INSERT INTO snapshots (id, session, tenant, parent, kind, created_at, fingerprint, has_memory,
        memory_bytes, layer_bytes, layers, image, turn, hidden, thinned, durable_at, node)
    SELECT {_SNAPSHOT}, {_SESSION}, 'ten_' || n %% {TENANTS},
        CASE WHEN s > 1 THEN 'snp_' || lpad((n * 8 + s - 1)::text, 24, '0') END,
        CASE WHEN s = 1 + n %% 5 THEN 'suspend' ELSE 'auto' END, %(time)s + n + s,
        {_LAYER.format("f", "n * 8 + s")}, s = 1 + n %% 5, 20000000, 100000, {_LAYERS},
        CASE WHEN s = 1 + n %% 5 THEN {_LAYER.format("i", "n * 8 + s")} END, s, FALSE, FALSE,
        CASE WHEN n > %(running)s OR s < 1 + n %% 5 OR n %% 2 = 0 THEN %(time)s + n + s + 2 END,
        'nod_' || n %% %(nodes)s
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n,
        LATERAL generate_series(1, 1 + n %% 5) AS s
    """,
    f"""
    INSERT INTO events (session, sequence, at, actor, kind, result, details, after)
    SELECT {_SESSION}, s, %(time)s + n + s, 'tenant', 'turn', 'ok',
        '{{"command": "python3 -c pass", "exit_code": 0, "seconds": 0.11}}', NULL
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n, generate_series(1, 2) AS s
    """,
    f"""
    INSERT INTO operations (id, session, tenant, verb, digest, request, exclusive, state, step,
        step_number, data, server, created_at, updated_at, finished_at)
    SELECT 'opr_' || lpad(n::text, 24, '0'), {_SESSION}, 'ten_' || n %% {TENANTS}, 'suspend',
        md5(n::text) || md5(n::text), '{{"actor": "tenant"}}', TRUE, 'succeeded', 'published', 4,
        '{{}}', 'nod_' || n %% %(nodes)s, %(time)s + n, %(time)s + n, %(time)s + n
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
    """,
    f"""
    INSERT INTO store_records (session, digest)
    SELECT {_SESSION}, {_LAYER.format("r", "n")}
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
    """,
]

_TABLES = ("sessions", "snapshots", "events", "operations", "store_records", "idempotency")


def fill(location: str, first: int, last: int, *, running: int, nodes: int, time: float) -> None:
    """Sessions number `first` to `last` and what belongs to them; those up to `running` run."""
    sample = SESSIONS.changes({"limits": Limits(), "policy": Policy()})
    parameters: dict[str, Any] = {
        "first": first,
        "last": last,
        "running": running,
        "nodes": nodes,
        "time": time,
        "limits": sample["limits"],
        "policy": sample["policy"],
        "network": encode_json(NetworkPolicy()),
    }
    with psycopg.connect(location, autocommit=True) as connection:
        # Neither triggers nor foreign keys: the rows fit together.
        connection.execute("SET session_replication_role = replica")
        connection.execute("SET synchronous_commit = off")
        for text in _FILL:
            connection.execute(text, parameters)
        connection.execute("SET session_replication_role = DEFAULT")
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def sizes(location: str) -> dict[str, int]:
    """Bytes of each table with its indexes."""
    with psycopg.connect(location, autocommit=True) as connection:
        found: dict[str, int] = {}
        for table in _TABLES:
            row = connection.execute(
                "SELECT pg_total_relation_size(%s::regclass)", (table,)
            ).fetchone()
            assert row is not None
            found[table] = int(row[0])
    return found
