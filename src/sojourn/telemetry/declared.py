"""Every metric there is; docs/observability.md describes each.

Guarantee: a metric that is not here does not exist, and one that is here is in the docs (a test
compares them). Names follow Prometheus: units in the name, `_total` is added to counters.
"""

from __future__ import annotations

from sojourn.telemetry.metrics import SHORT_SECONDS, Counter, Gauge, Histogram

# -- requests -----------------------------------------------------------------------------------

HTTP_REQUESTS = Counter(
    "sojourn_http_requests",
    "Requests that were answered, by method, address pattern and status.",
    ("method", "route", "status"),
)
HTTP_SECONDS = Histogram(
    "sojourn_http_request_seconds",
    "Time from a request to the head of its answer.",
    ("method", "route"),
)

# -- sessions -----------------------------------------------------------------------------------

SESSIONS = Gauge(
    "sojourn_sessions",
    "Sessions by state: those that this node holds, or all where the process is no node. Counted"
    " at most once a minute.",
    ("state",),
)
SANDBOXES = Gauge("sojourn_sandboxes", "Sandboxes that run or stand frozen on this machine.")
OPERATIONS = Counter(
    "sojourn_operations",
    "Verbs that ended, by their result: `ok`, or the code of the error.",
    ("verb", "result"),
)
OPERATION_SECONDS = Histogram(
    "sojourn_operation_seconds",
    "Time from the beginning of a verb to its end, whatever its result.",
    ("verb",),
)
OPERATIONS_RUNNING = Gauge(
    "sojourn_operations_running", "Verbs under way in this process.", ("verb",)
)
TURNS = Counter(
    "sojourn_turns",
    "Commands, file operations and pieces of code that ended, by kind and result.",
    ("kind", "result"),
)

# -- captures and resumes -----------------------------------------------------------------------

CAPTURE_STALL_SECONDS = Histogram(
    "sojourn_capture_stall_seconds",
    "How long a session stood still for a capture: `live` ones go on after it, `final` ones end.",
    ("kind",),
)
CAPTURES = Counter(
    "sojourn_captures",
    "Captures by kind and result: `ok`, or the code of the error.",
    ("kind", "result"),
)
CAPTURE_BYTES = Counter(
    "sojourn_capture_bytes",
    "Bytes that captures put into the node's store, by what they are: `memory` or `files`.",
    ("part",),
)
PLACE_SECONDS = Histogram(
    "sojourn_place_seconds",
    "Time to start a sandbox for a session, by what it starts from: `memory` or `files`.",
    ("source",),
)
FIRST_COMMAND_SECONDS = Histogram(
    "sojourn_first_command_seconds",
    "How long the call waited that woke a session, until its command could begin.",
)

# -- object store -------------------------------------------------------------------------------

STORE_SENT_BYTES = Counter(
    "sojourn_store_sent_bytes", "Bytes sent to the object store, after deduplication."
)
STORE_LAG_SECONDS = Gauge(
    "sojourn_store_lag_seconds",
    "Age of the oldest snapshot that is not in the object store yet; 0 when all are.",
)
STORE_WAITING = Gauge(
    "sojourn_store_waiting_snapshots", "Snapshots that are not in the object store yet."
)
STORE_FAILING = Gauge(
    "sojourn_store_failing", "1 while something cannot be sent to the object store, else 0."
)

# -- network ------------------------------------------------------------------------------------

GATEWAY_REQUESTS = Counter(
    "sojourn_gateway_requests",
    "Requests and connections that left sessions and ended, by kind and outcome.",
    ("kind", "outcome"),
)
GATEWAY_DENIALS = Counter(
    "sojourn_gateway_denials", "Requests and connections that a policy did not let out."
)
GATEWAY_STARTS = Counter("sojourn_gateway_starts", "Starts of the gateway process.")

# -- database -----------------------------------------------------------------------------------

DATABASE_SECONDS = Histogram(
    "sojourn_database_transaction_seconds",
    "Time from asking for a change in the database until it is committed or refused.",
    ("durable",),
    SHORT_SECONDS,
)
DATABASE_TRANSACTIONS = Counter(
    "sojourn_database_transactions",
    "Changes in the database by result: `ok`, or the code of the error.",
    ("result",),
)

# -- many nodes ---------------------------------------------------------------------------------

LEASE_LEFT_SECONDS = Gauge(
    "sojourn_lease_left_seconds", "How long this node may still act; 0 past the end of its lease."
)
LEASE_RENEWALS = Counter(
    "sojourn_lease_renewals",
    "Renewals of this node's lease by result: `ok`, or the code of the error.",
    ("result",),
)
LEASE_LOSSES = Counter(
    "sojourn_lease_losses",
    "How often this node was past its lease, with its sandboxes frozen until it was renewed or"
    " taken from it.",
)
NODES = Gauge(
    "sojourn_nodes", "Nodes by state, as this server sees them; `lost` beside it.", ("state",)
)
FAILOVERS = Counter("sojourn_failovers", "Nodes that this server declared lost.")
FAILED_OVER_SESSIONS = Counter(
    "sojourn_failed_over_sessions",
    "Sessions of lost nodes that this server took back, by the state they are in after.",
    ("state",),
)
QUEUE_LENGTH = Gauge("sojourn_queue_length", "Requests that wait for room on some node.")
QUEUE_REFUSALS = Counter(
    "sojourn_queue_refusals", "Requests that found no room on any node in time."
)
