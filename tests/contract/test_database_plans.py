"""What PostgreSQL does for the queries that are asked often: it reads indexes, never a whole table,
whatever the parameters are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sojourn.database.postgres.statements import QUERIES, text_of
from sojourn.database.rows import SESSIONS
from support.databases import PostgresHarness

SESSION_ROWS = 6000
FILL = [
    """
    INSERT INTO sessions (id, tenant, name, labels, template, env, limits, policy, driver, state,
        epoch, head, idle_deadline, lifetime_deadline, created_at, updated_at, network, holder)
    SELECT 'ses_' || n, 'ten_' || n %% 3, CASE WHEN n %% 10 = 0 THEN 'name' || n END,
        jsonb_build_object('user', (n %% 500)::text, 'common', '1'), 'base', '{}', '{}',
        jsonb_build_object('on_expiry', CASE WHEN n %% 50 = 0 THEN 'delete' ELSE 'suspend' END),
        'gvisor', CASE n %% 100 WHEN 0 THEN 'running' WHEN 1 THEN 'deleted' ELSE 'suspended' END,
        1, 'snp_' || n, CASE WHEN n %% 100 = 0 THEN 4e9 END, 4e9, n, n, '{}',
        CASE WHEN n %% 100 <> 1 THEN 'nod_' || n %% 1000 END
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO snapshots (id, session, tenant, parent, kind, created_at, fingerprint, has_memory,
        memory_bytes, layer_bytes, layers, hidden, thinned, durable_at, node)
    SELECT 'snp_' || n, 'ses_' || n, 'ten_' || n %% 3, NULL, 'auto', n, 'f', TRUE, 1, 1, '[]',
        n %% 1000 = 0, FALSE, CASE WHEN n %% 500 > 0 THEN 1.0 END,
        'nod_' || n %% 1000
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO operations (id, session, tenant, verb, digest, request, exclusive, state,
        step_number, data, server, created_at, updated_at, finished_at)
    SELECT 'opr_' || n, 'ses_' || n, 'ten_' || n %% 3, 'suspend', 'd', '{}', TRUE,
        CASE WHEN n %% 1000 = 0 THEN 'running' ELSE 'succeeded' END, 0, '{}', 's', n, n,
        CASE WHEN n %% 1000 > 0 THEN n END
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO idempotency (tenant, key, digest, operation, expires_at)
    SELECT 'ten_' || n %% 3, 'key' || n, 'd', 'opr_' || n, n + 4e9
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO events (session, sequence, at, actor, kind, details)
    SELECT 'ses_' || n, s, n, 'server', 'turn', '{}'
    FROM generate_series(1, %(rows)s) AS n, generate_series(1, 3) AS s
    """,
    """
    INSERT INTO effects (id, session, began_at, outcome, lasting, pending, effect)
    SELECT 'eff_' || n, 'ses_' || n, n, CASE WHEN n %% 1000 = 0 THEN 'open' ELSE 'done' END, TRUE,
        n %% 100 = 0, '{}'
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO tenants (id, name, created_at)
    SELECT 'ten_' || n, 'tenant' || n, n FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO exposed_ports (session, port, tenant, kind, public, token, sources, created_at)
    SELECT 'ses_' || n, 80, 'ten_' || n %% 3, 'http', TRUE, '', '[]', n
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO nodes (id, name, address, state, incarnation, lost, labels, taints, capacity, used,
        cpu, version, joined_at)
    SELECT 'nod_' || n, 'node' || n, '', 'ready', 1, FALSE, '{}', '[]', '{}', '{}', '[]', '', n
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO node_fences (node, incarnation)
    SELECT 'nod_' || n, 1 FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO tokens (id, hash, tenant, role, created_at)
    SELECT 'tok_' || n, 'hash' || n, 'ten_1', 'tenant', n FROM generate_series(1, %(rows)s) AS n
    """,
]

NOW = time.time()
PAGE = {
    "holder": None,
    "labels": "{}",
    "kind": "session",
    "after_time": None,
    "after_id": None,
    "limit": 101,
}
LIVE = json.dumps(["running", "paused", "suspended", "failed", "creating"])
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("find_session", {"key": "ses_7", "tenant": "ten_1"}),
    ("find_session", {"key": "ses_7", "tenant": None}),
    ("find_session_by_name", {"key": "name20", "tenant": "ten_2"}),
    ("find_sessions_by_name_of_any_tenant", {"key": "name20"}),
    ("find_template", {"key": "name20", "tenant": "ten_2"}),
    ("session_row", {"id": "ses_7"}),
    ("list_sessions", PAGE | {"tenant": "ten_1", "states": LIVE}),
    ("list_sessions", PAGE | {"tenant": None, "states": LIVE}),
    ("list_sessions", PAGE | {"tenant": "ten_1", "states": '["running"]'}),
    (
        "list_labelled_sessions",
        PAGE | {"tenant": "ten_1", "states": LIVE, "labels": '{"user": "7"}'},
    ),
    ("list_labelled_sessions", PAGE | {"tenant": None, "states": LIVE, "labels": '{"user": "7"}'}),
    (
        "list_sessions",
        PAGE | {"tenant": None, "states": LIVE, "after_time": 3000.0, "after_id": "ses_3000"},
    ),
    ("touch_idle", {"id": "ses_100", "deadline": 1.0}),
    ("due_sessions", {"now": NOW, "limit": 100, "holder": None}),
    ("find_snapshot", {"id": "snp_7", "tenant": "ten_1", "hidden": False}),
    ("list_snapshots", {"session": "ses_7"}),
    ("snapshot_users", {"id": "snp_7"}),
    ("pass_children_on", {"id": "snp_7"}),
    ("delete_snapshot", {"id": "snp_7"}),
    ("anchored_snapshots", {"session": "ses_7"}),
    ("undurable_heads", {"limit": 100, "node": None}),
    ("undurable_others", {"limit": 100, "node": None}),
    ("mark_durable", {"id": "snp_7", "fingerprint": "f", "at": 1.0}),
    ("find_operation", {"id": "opr_7", "tenant": "ten_1"}),
    ("exclusive_operation", {"session": "ses_7"}),
    ("operation_to_step", {"id": "opr_7"}),
    ("set_step", {"id": "opr_7", "step": "a", "data": "{}", "server": None, "now": NOW}),
    (
        "finish_operation",
        {"id": "opr_7", "state": "failed", "result": None, "error": None, "now": NOW},
    ),
    ("unfinished_operations", {"server": None}),
    ("claim_operations", {"server": "me", "before": NOW, "now": NOW, "limit": 10}),
    ("find_key", {"tenant": "ten_1", "key": "key7"}),
    ("keyed_operation", {"tenant": "ten_1", "key": "key7", "now": NOW}),
    ("list_events", {"session": "ses_7", "after": 0, "kinds": None, "limit": 100}),
    ("list_events", {"session": "ses_7", "after": 0, "kinds": '["turn"]', "limit": 100}),
    (
        "append_event",
        {
            "session": "ses_7",
            "at": NOW,
            "actor": "a",
            "kind": "k",
            "result": None,
            "details": "{}",
            "before": None,
            "after": None,
            "operation": None,
        },
    ),
    ("link_event", {"session": "ses_7", "sequence": 1, "before": None, "after": "snp_1"}),
    ("settle_effects", {"session": "ses_7", "until": NOW}),
    (
        "list_effects",
        {"session": "ses_7", "all": False, "after_time": 0.0, "after_id": "", "limit": 100},
    ),
    ("open_effects", {"limit": 100, "holder": None}),
    ("find_tenant", {"key": "tenant7"}),
    ("token_by_hash", {"hash": "hash7"}),
    ("stored_hash", {"id": "tok_7"}),
    ("open_transaction", {"commit": "c", "level": "on", "sessions": ["ses_7", "ses_9"]}),
    (
        "open_fenced_transaction",
        {"commit": "c", "level": "on", "sessions": ["ses_7"], "node": "nod_7", "incarnation": 1},
    ),
    ("node_row", {"id": "nod_7"}),
    ("find_node", {"key": "node7"}),
    ("renew_node", {"id": "nod_7", "incarnation": 1, "lease": 15.0, "used": None}),
    ("stop_node", {"id": "nod_7", "incarnation": 1}),
    ("set_fence", {"node": "nod_7", "incarnation": 2}),
    ("mark_lost", {"id": "nod_7"}),
    ("lost_node", {"id": "nod_7"}),
    ("sessions_of_lost_node", {"node": "nod_none", "limit": 100}),
    ("take_session", {"id": "ses_7", "holder": "nod_7", "epoch": 1, "now": NOW}),
    ("release_session", {"id": "ses_7", "holder": "nod_7", "epoch": 1, "now": NOW}),
    ("operations_of_session", {"server": "nod_7", "session": "ses_7"}),
    ("sessions_of_lost_node", {"node": "nod_7", "limit": 100}),
    ("operations_of_lost_node", {"node": "s", "sessions": None, "limit": 100}),
    ("operations_of_lost_node", {"node": "s", "sessions": '["ses_1000"]', "limit": 100}),
    ("effects_of_lost_sessions", {"sessions": '["ses_1000"]'}),
    ("durable_lines", {"sessions": '["ses_7", "ses_500"]'}),
    ("references_held", {"holder": "nod_7"}),
    ("durable_objects_held", {"holder": "nod_7"}),
    ("unfinished_operations", {"server": "s"}),
    ("due_sessions", {"now": NOW, "limit": 100, "holder": "nod_7"}),
    ("due_sessions", {"now": NOW, "limit": 100, "holder": ""}),
    ("undurable_heads", {"limit": 100, "node": "nod_20"}),
    ("undurable_others", {"limit": 100, "node": "nod_20"}),
    ("count_sessions", {"tenant": None, "holder": "nod_7"}),
    ("ports_held", {"session": None, "holder": "nod_7"}),
    ("open_effects", {"limit": 100, "holder": "nod_7"}),
    ("durability", {"tenant": None, "holder": None, "session": "ses_7", "waiting": False}),
    ("durability", {"tenant": "ten_1", "holder": None, "session": None, "waiting": True}),
    ("list_sessions", PAGE | {"tenant": None, "states": LIVE, "holder": "nod_7"}),
    ("lock_snapshots", {"snapshots": ["snp_7"]}),
    ("settle_commit", {"commit": "c"}),
    (
        "update_session",
        {"where_id": "ses_7", "expect_epoch": 1, "expect_state": '["suspended"]', "epoch": 2},
    ),
]


@pytest.fixture(scope="module")
def filled(postgres: PostgresHarness) -> Iterator[psycopg.Connection[Any]]:
    """A database with many sessions, of which few are running."""
    name = postgres.server.create(postgres.name)
    with postgres.server.connect(name) as connection:
        connection.execute("SET session_replication_role = replica")
        for text in FILL:
            connection.execute(text, {"rows": SESSION_ROWS})
        connection.execute("SET session_replication_role = DEFAULT")
        connection.execute("ANALYZE")
        yield connection
    postgres.server.drop(name)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)


def plan(
    connection: psycopg.Connection[Any], query: str, parameters: dict[str, Any], *, general: bool
) -> dict[str, Any]:
    """The plan of a query as the server makes it: for these parameters, or for any."""
    assignments = SESSIONS.assignments({"epoch"}) if query == "update_session" else ""
    text = text_of(query, assignments)
    mode = "force_generic_plan" if general and text.prepare else "force_custom_plan"
    connection.execute(f"SET plan_cache_mode = {mode}")
    row = connection.execute(
        "EXPLAIN (FORMAT json) " + text.text, parameters, prepare=text.prepare
    ).fetchone()
    assert row is not None
    found: dict[str, Any] = row[0][0]["Plan"]
    return found


@pytest.mark.parametrize(
    ("query", "parameters"), ASKED, ids=[f"{n}-{query}" for n, (query, _) in enumerate(ASKED)]
)
def test_no_table_is_read_as_a_whole(
    filled: psycopg.Connection[Any], query: str, parameters: dict[str, Any]
) -> None:
    for general in (False, True):
        made = plan(filled, query, parameters, general=general)
        scanned = [node["Relation Name"] for node in nodes(made) if node["Node Type"] == "Seq Scan"]
        assert scanned == [], json.dumps(made, indent=1)


def test_a_scan_would_be_seen(filled: psycopg.Connection[Any]) -> None:
    made = plan(filled, "references", {}, general=False)
    assert any(node["Node Type"] == "Seq Scan" for node in nodes(made))


def test_a_page_costs_the_same_wherever_it_is(filled: psycopg.Connection[Any]) -> None:
    """Rows that are read, not time: as few for a page far behind as for the first one, a small
    multiple of the page where the index of all tenants is the cheaper one."""

    def read(**parameters: Any) -> int:
        text = text_of("list_sessions")
        row = filled.execute(
            "EXPLAIN (ANALYZE, FORMAT json) " + text.text,
            PAGE | {"tenant": "ten_1", "states": '["suspended"]', "limit": 50} | parameters,
            prepare=False,
        ).fetchone()
        assert row is not None
        scans = [node for node in nodes(row[0][0]["Plan"]) if "Relation Name" in node]
        return sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in scans
        )

    assert read() <= 200
    assert read(after_time=300.0, after_id="ses_300") <= 200


def test_a_page_of_a_common_label_takes_no_notice_of_how_many_have_it(
    filled: psycopg.Connection[Any],
) -> None:
    """It is found among the newest sessions; only a rare one by the index of labels."""

    def by_index(label: str, value: str) -> float:
        asked = PAGE | {"tenant": "ten_1", "states": '["suspended"]', "limit": 20}
        row = filled.execute(
            "EXPLAIN (ANALYZE, FORMAT json) " + text_of("list_labelled_sessions").text,
            asked | {"labels": json.dumps({label: value})},
            prepare=False,
        ).fetchone()
        assert row is not None
        return sum(
            node["Actual Loops"]
            for node in nodes(row[0][0]["Plan"])
            if node.get("Index Name") == "sessions_by_label"
        )

    assert by_index("common", "1") == 0
    assert by_index("user", "7") == by_index("user", "none") == 1


def test_every_query_is_one_that_postgresql_understands(filled: psycopg.Connection[Any]) -> None:
    """Those that are asked seldom, too: each can be prepared."""
    for query in sorted(QUERIES.names()):
        assignments = {"update_session": '"epoch" = :epoch', "update_snapshot": '"turn" = :turn'}
        text = text_of(query, assignments.get(query, "")).text
        names = {part.split(")s")[0] for part in text.split("%(")[1:]}
        for number, name in enumerate(sorted(names), 1):
            text = text.replace(f"%({name})s", f"${number}")
        filled.execute(f"PREPARE checked AS {text}".replace("%%", "%").encode(), prepare=False)
        filled.execute("DEALLOCATE checked")
