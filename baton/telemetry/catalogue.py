"""Every metric of Baton, once: code and the table in `docs/metrics.md` both come from here.

Names end in their unit, counters in `_total`. Labels take few values: words of our own, models and workers as
they name themselves in heartbeats, never a client's input. The `gen_ai_*` histograms are those of
OpenTelemetry's conventions for generative AI, with their boundaries and attributes, in Prometheus' spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton.messages.attempts import AttemptState
from baton.transfer import Cause


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


GATEWAY: Final = ("gateway",)
SCHEDULER: Final = ("scheduler",)
KVINDEX: Final = ("kvindex",)
PREFILL_DECODE: Final = ("prefill", "decode")
EVERYONE: Final = GATEWAY + SCHEDULER + KVINDEX + PREFILL_DECODE


@dataclass(frozen=True, slots=True)
class Row:
    kind: Kind
    name: str
    services: tuple[str, ...]
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    """Values of the only label, shown as 0 from the start: Prometheus sees no increase in a series that begins at 1."""
    buckets: tuple[float, ...] = ()


_rows: list[Row] = []


def _counter(name: str, services: tuple[str, ...], text: str, *labels: str, known: tuple[str, ...] = ()) -> Row:
    return _add(Row(Kind.COUNTER, name, services, text, labels, known))


def _gauge(name: str, services: tuple[str, ...], text: str, *labels: str, known: tuple[str, ...] = ()) -> Row:
    return _add(Row(Kind.GAUGE, name, services, text, labels, known))


def _histogram(name: str, services: tuple[str, ...], text: str, *labels: str, buckets: tuple[float, ...]) -> Row:
    return _add(Row(Kind.HISTOGRAM, name, services, text, labels, buckets=buckets))


def _add(row: Row) -> Row:
    _rows.append(row)
    return row


def rows() -> Sequence[Row]:
    return _rows


def rows_of(service: str) -> list[Row]:
    return [row for row in _rows if service in row.services]


# ---------------------------------------------------------------- every service

BUILD: Final = _gauge("baton_build_info", EVERYONE, "1; the labels say what runs.", "service", "version")
READY: Final = _gauge("baton_ready", EVERYONE, "1 while the service can do its work, as `/ready` says, else 0.")
DRAINING: Final = _gauge(
    "baton_draining", EVERYONE, "1 while the service drains: told to end, it finishes its work; else 0."
)
EVENT_LOOP_LAG: Final = _histogram(
    "baton_event_loop_lag_seconds",
    EVERYONE,
    "Lag of the event loop behind its timers, measured four times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
BUS_CONNECTED: Final = _gauge("baton_bus_connected", EVERYONE, "1 while NATS can be reached, else 0.")
BUS_RECONNECTS: Final = _counter("baton_bus_reconnects_total", EVERYONE, "Connections to NATS lost and restored.")
BUS_HANDLED: Final = _counter(
    "baton_bus_messages_total",
    EVERYONE,
    "Messages handled, by subject without the names in it; those on `baton.heartbeat` are the workers' heartbeats.",
    "subject",
)
BUS_DROPPED: Final = _counter(
    "baton_bus_dropped_messages_total", EVERYONE, "Messages dropped because the handler was too slow.", "subject"
)
BUS_MALFORMED: Final = _counter(
    "baton_bus_malformed_messages_total", EVERYONE, "Payloads that are no valid message.", "subject"
)

# ---------------------------------------------------------------- gateway

_GEN_AI: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
REQUEST_DURATION: Final = _histogram(
    "gen_ai_server_request_duration_seconds",
    GATEWAY,
    "Time of a generation request from its arrival to the last byte of its answer; its count is the requests."
    " `error_type` is empty for complete answers, else a code of `baton/errors.py`.",
    *_GEN_AI,
    "error_type",
    buckets=(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN: Final = _histogram(
    "gen_ai_server_time_to_first_token_seconds",
    GATEWAY,
    "Time from a request's arrival to the first token of an answer, for complete answers.",
    *_GEN_AI,
    buckets=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN: Final = _histogram(
    "gen_ai_server_time_per_output_token_seconds",
    GATEWAY,
    "Time per token after the first, for complete answers of at least two tokens.",
    *_GEN_AI,
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
HTTP_RESPONSES: Final = _counter(
    "baton_http_responses_total",
    GATEWAY,
    "HTTP responses begun; `route` is `other` for paths with a name in them, and for what is not served.",
    "route",
    "status",
)
ANSWERS: Final = _counter(
    "baton_answers_total",
    GATEWAY,
    "Answers (choices of a request) by their end: a finish reason, or a code of `baton/errors.py`.",
    "end",
    known=(
        *("stop", "length", "client_gone", "invalid_request", "overloaded", "no_workers", "no_responders"),
        *("bus_unavailable", "unavailable", "deadline_exceeded", "worker_lost", "transfer_failed", "peer_unreachable"),
        *("engine_failed", "not_resumable", "request_stopped", "retries_limited", "internal_error"),
    ),
)
OBJECTIVES: Final = _counter(
    "baton_objective_answers_total",
    GATEWAY,
    "Answers by what became of their objectives: `attained` (the rate of these is the goodput), `missed_ttft`,"
    " `missed_tpot` (with the TTFT attained), or `refused`, as no worker was free in time. Answers with other errors"
    " are not counted.",
    "model",
    "result",
)
WORKER_OBJECTIVES: Final = _counter(
    "baton_worker_objective_answers_total",
    GATEWAY,
    "The same of complete answers, by worker, of workers that are live; that of a pair counts for both.",
    "worker",
    "result",
)
ANSWERS_RUNNING: Final = _gauge("baton_answers_running", GATEWAY, "Answers in progress, waiting ones included.")
ATTEMPTS: Final = _counter(
    "baton_attempts_total",
    GATEWAY,
    "Attempts sent to workers, by their end. Most that are not `done` are retried, unnoticed by clients.",
    "end",
    known=(
        *("done", "busy", "no_responders", "bus_unavailable", "client_gone", "deadline_exceeded", "worker_lost"),
        *("transfer_failed", "peer_unreachable", "engine_failed", "attempt_failed", "invalid_request", "moved"),
        "internal_error",
    ),
)
ADMISSION_WAITING: Final = _gauge(
    "baton_admission_waiting", GATEWAY, "Answers that wait for a worker with room.", "model"
)
ADMISSION_WAIT: Final = _histogram(
    "baton_admission_wait_seconds",
    GATEWAY,
    "Waiting time of answers that had to wait for room, until a worker accepted them or they were refused.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
PROMPT_TOKENS: Final = _counter("baton_prompt_tokens_total", GATEWAY, "Prompt tokens of complete answers.")
OUTPUT_TOKENS: Final = _counter("baton_output_tokens_total", GATEWAY, "Output tokens of complete answers.")
CACHED_PREDICTED: Final = _counter(
    "baton_predicted_cached_tokens_total",
    GATEWAY,
    "Prompt tokens of complete answers that the last attempt's placement predicted to be cached.",
)
CACHED_ACTUAL: Final = _counter(
    "baton_cached_tokens_total",
    GATEWAY,
    "Prompt tokens of complete answers that were actually cached, as the last attempt's workers reported.",
)
TENANT_TOKENS: Final = _counter(
    "baton_tenant_tokens_total",
    GATEWAY,
    "Tokens that API keys have used, by tenant and kind: `prompt`, `cached` (part of these) or `output`. Tenant"
    " `settings` stands for all keys in the settings, `other` for those of more than 100 tenants.",
    "tenant",
    "kind",
)
RATE_LIMITED: Final = _counter(
    "baton_rate_limited_total",
    GATEWAY,
    "Requests refused with 429, as their API key had used its requests or tokens per minute.",
    "limit",
    known=("requests", "tokens"),
)
RATE_UNCHECKED: Final = _counter(
    "baton_rate_unchecked_total",
    GATEWAY,
    "Limits that could not be checked, as Redis was away; `--without-redis` says what became of the requests.",
)
TENANT_STORE_UP: Final = _gauge(
    "baton_tenant_store_up", GATEWAY, "1 while Redis serves API keys and their limits, 0 since it failed to."
)
TTFT_PREDICTION: Final = _histogram(
    "baton_ttft_prediction_ratio",
    GATEWAY,
    "Time from an attempt's placement to its first token, divided by the scheduler's prediction.",
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0),
)
WORKERS: Final = _gauge(
    "baton_workers",
    ("gateway", "scheduler"),
    "Workers with recent heartbeats, seen from this service.",
    "role",
    "model",
)

# ---------------------------------------------------------------- scheduler

PLACEMENTS: Final = _counter(
    "baton_placements_total",
    SCHEDULER,
    "Placements made; requests held; refusals by their code, gateways' probes included.",
    "result",
    known=(
        *("disaggregated", "aggregated", "held", "overloaded", "no_workers", "model_not_found", "invalid_request"),
        "deadline_exceeded",
    ),
)
PLACE_DURATION: Final = _histogram(
    "baton_place_duration_seconds",
    SCHEDULER,
    "Time to place an attempt, the index query included.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
)
PLACING: Final = _gauge("baton_placing", SCHEDULER, "Placements in progress.")
HELD_REQUESTS: Final = _gauge("baton_held_requests", SCHEDULER, "Requests held until a worker has room.", "model")
WITHOUT_INDEX: Final = _counter(
    "baton_placements_without_index_total", SCHEDULER, "Placements made without the index, because it did not answer."
)
ASKED_AGAIN: Final = _counter(
    "baton_index_asked_again_total",
    SCHEDULER,
    "Match queries sent to all indexes, because the first that was asked was late.",
)
DECISIONS_RECORDED: Final = _counter(
    "baton_decisions_recorded_total",
    SCHEDULER,
    "Decisions published for `baton explain`, and dropped because they could not be published in time.",
    "result",
    known=("published", "dropped"),
)
BREAKERS: Final = _gauge(
    "baton_breakers",
    SCHEDULER,
    "Workers and pairs that placements pass over, because they fail or make no progress, by state: `open`, or"
    " `half_open` when one request at a time may try them.",
    "kind",
    "state",
)
BREAKERS_OPENED: Final = _counter(
    "baton_breakers_opened_total",
    SCHEDULER,
    "Breakers of workers and pairs opened, those included that were tried in vain, by cause.",
    "cause",
    known=("failures", "no_progress", "restarts"),
)
SOFT_PLACEMENTS: Final = _gauge(
    "baton_soft_placements", SCHEDULER, "Attempts counted on workers whose heartbeats do not list them yet.", "role"
)
ROLE_PRESSURE: Final = _gauge(
    "baton_role_pressure",
    SCHEDULER,
    "Demand for a role as a share of what its workers can do; above 1, requests queue up.",
    "role",
    "model",
)
REPLICAS: Final = _gauge(
    "baton_replicas_recommended",
    SCHEDULER,
    "Workers that a role needs at a pressure of 0.7, for autoscalers.",
    "role",
    "model",
)
ROLE_ORDERS: Final = _counter(
    "baton_role_orders_total",
    SCHEDULER,
    "Changes of role that this scheduler ordered, by new role; refusals by their code.",
    "result",
    known=("prefill", "decode", "conflict", "invalid_request", "unavailable", "no_responders", "deadline_exceeded"),
)
SUPERVISOR: Final = _gauge("baton_supervisor", SCHEDULER, "1 on the one scheduler that changes roles, else 0.")
INCOMPATIBLE_PAIRS: Final = _gauge(
    "baton_incompatible_pairs",
    SCHEDULER,
    "Pairs of a prefill and a decode worker of one model that cannot hand off, because their KV is incompatible.",
    "model",
)

# ---------------------------------------------------------------- kvindex

MATCH_DURATION: Final = _histogram(
    "baton_match_duration_seconds",
    KVINDEX,
    "Time to find in memory which workers hold how much of a prompt.",
    buckets=(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01),
)
INDEX_BLOCKS: Final = _gauge("baton_index_blocks", KVINDEX, "Distinct blocks that workers hold, on any tier.")
INDEX_HOLDINGS: Final = _gauge(
    "baton_index_holdings_blocks",
    KVINDEX,
    "Blocks held on each tier, summed over workers: `device`, `pool` or `file`.",
    "tier",
)
INDEX_COLD: Final = _gauge(
    "baton_index_cold_blocks",
    KVINDEX,
    "Distinct blocks that are spilled to Redis, for lack of memory.",
)
INDEX_MEMORY: Final = _gauge("baton_index_memory_bytes", KVINDEX, "Memory that blocks take, bounded by a setting.")
INDEX_FORGOTTEN: Final = _gauge(
    "baton_index_forgotten_blocks",
    KVINDEX,
    "Blocks that workers hold and the index has dropped: memory has no room even for their place in Redis.",
)
INDEX_RELOADS: Final = _counter("baton_index_reloads_total", KVINDEX, "Lookups of spilled blocks in Redis.")
INDEX_WORKERS: Final = _gauge("baton_index_workers", KVINDEX, "Workers that the index follows.")
INDEX_SPECULATIVE: Final = _gauge(
    "baton_index_speculative_blocks",
    KVINDEX,
    "Speculative blocks: those of prompts placed on workers that do not hold them yet.",
)
INDEX_MESSAGES: Final = _counter(
    "baton_index_messages_total",
    KVINDEX,
    "Messages of KV events, placements and audits; `stale` ones are of an earlier generation. From `malformed` on they"
    " were refused, and if blocks may be missing now, the worker is resynced.",
    "result",
    known=(*("applied", "duplicate", "stale", "malformed", "oversized", "foreign_model", "unknown_worker", "full"),),
)
INDEX_RESYNCS: Final = _counter(
    "baton_index_resyncs_total",
    KVINDEX,
    "Resyncs of a worker from its shadow map, by reason: it `joined` with events behind it, `gap` in"
    " its events, `behind` its heartbeats, an invalid event (`unknown_parent`, `malformed`, `oversized`) or one without"
    " room (`full`), `drift`: its fingerprint differed though every event had arrived, `audit`: half of its hits were"
    " persistently missing, or `cold`: Redis lost spilled blocks.",
    "reason",
    known=(*("joined", "behind", "gap", "unknown_parent", "malformed", "oversized", "full", "drift", "audit", "cold"),),
)
INDEX_AUDIT_PREDICTED: Final = _counter(
    "baton_index_audit_predicted_tokens_total",
    KVINDEX,
    "Prompt tokens that placements predicted a worker to hold when they sent it a prompt to compute.",
    "worker",
)
INDEX_AUDIT_CACHED: Final = _counter(
    "baton_index_audit_cached_tokens_total",
    KVINDEX,
    "Predicted tokens that the worker actually held.",
    "worker",
)
INDEX_WRITER: Final = _gauge("baton_index_writer", KVINDEX, "1 on the one replica that writes to Redis, else 0.")
INDEX_UNWRITTEN: Final = _gauge(
    "baton_index_unwritten", KVINDEX, "1 on the writer while changes wait for Redis, else 0."
)
INDEX_STORE_UP: Final = _gauge(
    "baton_index_store_up", KVINDEX, "0 while the replica that is to write to Redis fails to, else 1."
)
INDEX_SEQUENCE: Final = _gauge(
    "baton_index_stream_sequence", KVINDEX, "Sequence number of the newest message read from the event stream."
)

# ---------------------------------------------------------------- prefill, decode

WORKER: Final = _gauge(
    "baton_worker_info", PREFILL_DECODE, "1; the labels identify the worker.", "worker", "role", "model", "engine"
)
ROLE_CHANGES: Final = _counter("baton_worker_role_changes_total", PREFILL_DECODE, "Changes of role since the start.")
HELD: Final = _gauge(
    "baton_worker_attempts",
    PREFILL_DECODE,
    "Attempts in the ledger, by state.",
    "state",
    known=tuple(AttemptState),
)
ENDED: Final = _counter(
    "baton_worker_attempts_ended_total",
    PREFILL_DECODE,
    "Attempts that ended here; `held`: the prompt is computed and waits for decode.",
    "end",
    known=(
        *("stop", "length", "cancelled", "held", "deadline_exceeded", "transfer_failed", "peer_unreachable"),
        *("engine_failed", "attempt_failed", "worker_lost", "overloaded"),
    ),
)
REFUSED: Final = _counter(
    "baton_worker_refusals_total",
    PREFILL_DECODE,
    "Tasks refused, by reason; `parameters`: the engine does not support what the request asks.",
    "reason",
    known=(
        *("full", "leases", "draining", "generation", "role", "tombstone", "expired", "incomplete", "malformed"),
        "parameters",
    ),
)
SLOTS: Final = _gauge("baton_worker_slots", PREFILL_DECODE, "Run slots.", "state")
FIRST_OUTPUT: Final = _histogram(
    "baton_first_output_seconds",
    PREFILL_DECODE,
    "Time from entering the engine to its first output: prompt computed (`prefill`), KV pulled and first token"
    " sampled (`decode`), both (`whole`).",
    "leg",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
KV_BLOCKS: Final = _gauge(
    "baton_kv_blocks",
    PREFILL_DECODE,
    "The engine's KV blocks: `used` by requests, `leased` to decode workers, `free`; cached ones count as free.",
    "state",
)
KV_CACHED: Final = _gauge(
    "baton_kv_cached_blocks", PREFILL_DECODE, "Engine blocks with a prefix that new requests can use, in use or free."
)
KV_RESERVED: Final = _gauge("baton_kv_reserved_blocks", PREFILL_DECODE, "Engine blocks that the ledger has reserved.")
ENGINE_REQUESTS: Final = _gauge("baton_engine_requests", PREFILL_DECODE, "Requests in the engine.", "state")
ENGINE_BUSY: Final = _counter(
    "baton_engine_busy_seconds_total", PREFILL_DECODE, "Time in which the engine had something to compute."
)
ENGINE_PROMPT: Final = _counter(
    "baton_engine_prompt_tokens_total",
    PREFILL_DECODE,
    "Prompt tokens by source: `computed` here, `cached` on the device, `promoted` from the pool, `pulled`.",
    "source",
)
ENGINE_OUTPUT: Final = _counter("baton_engine_output_tokens_total", PREFILL_DECODE, "Tokens generated here.")
ENGINE_STEPS: Final = _counter(
    "baton_engine_output_steps_total",
    PREFILL_DECODE,
    "Engine steps that generated tokens here; output tokens by these are the tokens per step.",
)
POOL_SLOTS: Final = _gauge(
    "baton_kv_pool_slots",
    PREFILL_DECODE,
    "Slots of the KV pool: `pinned` by readers, `ready` for them, `free` or being written.",
    "state",
)
POOL_BLOCKS: Final = _counter(
    "baton_kv_pool_blocks_total",
    PREFILL_DECODE,
    "Blocks that the KV pool has `saved`, `evicted` or `dropped`: not saved for lack of room. "
    "`stranded` ones were evicted before their successors.",
    "event",
)
POOL_LOANS: Final = _counter(
    "baton_kv_pool_loan_tokens_total",
    PREFILL_DECODE,
    "Tokens whose KV the pool has `lent` to other workers and `borrowed` from them.",
    "side",
)
POOL_LOANS_FAILED: Final = _counter(
    "baton_kv_pool_loans_failed_total",
    PREFILL_DECODE,
    "Loans that did not arrive, or not in time; their tokens were computed.",
)
FILE_SLOTS: Final = _gauge(
    "baton_kv_file_slots", PREFILL_DECODE, "Slots of the KV pool's file: `ready` for readers, or `free`.", "state"
)
FILE_BLOCKS: Final = _counter(
    "baton_kv_file_blocks_total",
    PREFILL_DECODE,
    "Blocks of the KV pool's file: `written`, `evicted`, `deferred` since the disk was busy with others, and `failed`: "
    "they could not be written or read, or were not what had been written.",
    "event",
)
FILE_LOADED: Final = _counter(
    "baton_kv_file_loaded_tokens_total", PREFILL_DECODE, "Tokens whose KV was read from the file into the KV pool."
)
FILE_LOADING: Final = _counter(
    "baton_kv_file_loading_seconds_total", PREFILL_DECODE, "Time in which the file was read."
)
FILE_UNREAD: Final = _counter(
    "baton_kv_file_unread_prefixes_total",
    PREFILL_DECODE,
    "Prefixes in the file that were computed: reading was `late`, or `declined` since it was expected to be.",
    "reason",
)
PRICE: Final = _gauge(
    "baton_worker_price_per_hour",
    PREFILL_DECODE,
    "Price of this worker for an hour, from its setting `price_per_hour`; 0: not given.",
)
PREEMPTIONS: Final = _counter(
    "baton_engine_preemptions_total", PREFILL_DECODE, "Preemptions of requests by the engine."
)
PREFILL_QUEUED: Final = _gauge(
    "baton_prefill_queued_tokens", PREFILL_DECODE, "Prompt tokens accepted and not yet computed."
)
PREFILL_RATE: Final = _gauge(
    "baton_prefill_rate_tokens_per_second",
    PREFILL_DECODE,
    "Prefill speed in full steps, without running sequences.",
)
DECODE_RATE: Final = _gauge(
    "baton_decode_rate_tokens_per_second", PREFILL_DECODE, "Decode speed of one sequence at the present batch."
)
TRANSFER_RATE: Final = _gauge(
    "baton_transfer_rate_bytes_per_second", PREFILL_DECODE, "Bandwidth of pulls from the newest peer."
)
PULLS: Final = _counter(
    "baton_pulls_total", ("decode",), "Pulls that arrived completely and verified, counted per rank.", "backend"
)
PULL_FAILURES: Final = _counter(
    "baton_pull_failures_total",
    ("decode",),
    "Pulls that failed, by cause.",
    "cause",
    known=tuple(cause for cause in Cause if cause is not Cause.NONE),
)
PULLED: Final = _counter("baton_pulled_bytes_total", ("decode",), "KV pulled by decode.", "backend")
PULL_MOVING: Final = _counter(
    "baton_pull_moving_seconds_total",
    ("decode",),
    "Time in which bytes of pulls were moving; pulled bytes by this time is the transfer's speed.",
    "backend",
)
PULL_WAITING: Final = _counter(
    "baton_pull_waiting_seconds_total",
    ("decode",),
    "Time in which pulls waited for prefill to compute, with nothing to move.",
    "backend",
)
PULL_FALLBACKS: Final = _counter(
    "baton_pull_fallbacks_total",
    PREFILL_DECODE,
    "Pulls whose preferred backend failed although both ends support it and reach each other by it. "
    "The agent's log says once which backend was used instead, and why.",
)
LANES_RETIRED: Final = _counter(
    "baton_transfer_lanes_retired_total",
    PREFILL_DECODE,
    "Connections to a source that were lost, or given up because they hung while others progressed.",
)
AGENT_OPEN: Final = _gauge(
    "baton_agent_transfers",
    PREFILL_DECODE,
    "Open in the transfer agents: `leases`, `pulls`, and asks `parked` until their lease opens.",
    "kind",
)
SERVED: Final = _counter("baton_served_bytes_total", PREFILL_DECODE, "KV that peers pulled from here.")
LEASES_LOST: Final = _counter(
    "baton_leases_lost_total",
    PREFILL_DECODE,
    "Leases that no peer fetched in time (`expired`) or that were `revoked`.",
    "cause",
)
CHECKSUM_FAILURES: Final = _counter(
    "baton_checksum_failures_total",
    PREFILL_DECODE,
    "Blocks that arrived with a wrong checksum, and were discarded.",
)
EVENTS_PUBLISHED: Final = _counter(
    "baton_kv_published_messages_total", PREFILL_DECODE, "Messages of KV events that the stream has stored."
)
EVENTS_WAITING: Final = _gauge(
    "baton_kv_waiting_messages", PREFILL_DECODE, "Messages of KV events that wait to be stored."
)
SHADOW: Final = _gauge(
    "baton_shadow_blocks", PREFILL_DECODE, "Canonical blocks held on each tier: `device`, `pool` or `file`.", "tier"
)
FRAMES_DROPPED: Final = _counter(
    "baton_frames_dropped_total", PREFILL_DECODE, "Frames that could not be sent; gateways ask for them again."
)
