"""Settings of the gateway."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from baton.config import is_loopback
from baton.node.settings import NodeSettings, Seconds
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.objectives import Objectives
from baton_gateway.parsing.formats import FormatName
from baton_gateway.tenants.tenant import Milliseconds, Tenant, tenant_of


class WithoutRedis(StrEnum):
    """What becomes of keys and limits that need Redis while it is away."""

    OPEN = "open"
    CLOSED = "closed"


class Settings(NodeSettings, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes any free one.")] = 8000
    processes: Annotated[
        int,
        Meta(ge=1, le=64, description="Processes that share the port; limits of the other settings are for each."),
    ] = 1
    reuse_port: Annotated[bool, Meta(description="Share the port with other gateways that have this flag.")] = False
    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="API keys; clients send one as a bearer token. Empty: open to all."),
    ] = ()
    stored_keys: Annotated[
        bool, Meta(description="Take the API keys that `baton keys create` has stored in Redis, too.")
    ] = False
    keys_kept_s: Annotated[
        Seconds, Meta(description="Time for which a stored key is not read again: a revoked one is refused after it.")
    ] = 5.0
    without_redis: Annotated[
        WithoutRedis,
        Meta(
            description="While Redis is away, limits are not enforced, and stored keys that were read before go on to "
            "work (open), or requests that need it are answered 503 (closed)."
        ),
    ] = WithoutRedis.OPEN
    output_tokens_reserved: Annotated[
        int,
        Meta(
            ge=1,
            description="Most output tokens that an answer reserves of its key's tokens per minute; it is charged for "
            "those that it has.",
        ),
    ] = 1024
    allow_open: Annotated[
        bool, Meta(description="Listen without keys on an address that other machines reach, as behind a proxy.")
    ] = False

    deadline_s: Annotated[
        float, Meta(gt=0, description="Limit of the time to first token; the header x-baton-deadline-s may lower it.")
    ] = 300.0
    attempts_max: Annotated[int, Meta(ge=1, le=16, description="Failed attempts after which an answer fails.")] = 4
    place_resend_s: Annotated[Seconds, Meta(description="Time before another scheduler is asked.")] = 0.25
    place_resends_max: Annotated[int, Meta(ge=0, le=100, description="How often another scheduler is asked.")] = 3
    accept_s: Annotated[
        Seconds, Meta(description="Time for the workers to accept a first attempt; retries get more.")
    ] = 0.1
    first_token_s: Annotated[Seconds, Meta(description="Time for the first token of an accepted attempt.")] = 120.0
    progress_s: Annotated[
        Seconds,
        Meta(
            description="Time without a further token after which an attempt is stuck; also how long an answer that "
            "has begun waits for another worker."
        ),
    ] = 30.0
    resend_s: Annotated[Seconds, Meta(description="Time to wait for missing frames before asking again.")] = 0.25
    learn_s: Annotated[
        float, Meta(ge=0, description="Time to learn of the workers before the first request is answered.")
    ] = 0.6

    admission_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How long a new request waits for a free worker (then 429), or for the bus, a scheduler or any "
            "worker of its model to return (503).",
        ),
    ] = 10.0
    requests_max: Annotated[int, Meta(ge=1, description="Answers in progress; beyond this, 429.")] = 4096

    ttft_ms: Annotated[
        Milliseconds, Meta(description="TTFT objective of requests that state none, for their order and metrics.")
    ] = 1000.0
    tpot_ms: Annotated[Milliseconds, Meta(description="TPOT objective of requests that state none, for metrics.")] = (
        100.0
    )
    admit_by_objectives: Annotated[
        bool, Meta(description="Refuse requests that cannot meet these defaults; those that are stated always count.")
    ] = False
    tenants: Annotated[
        dict[str, Tenant],
        Meta(
            description="Weight, ttft_ms, tpot_ms, priority, models, requests_per_minute, tokens_per_minute and "
            "permissions of the tenants of api_keys, as JSON, by the first 32 characters of the SHA-256 of their keys."
        ),
    ] = field(default_factory=dict[str, Tenant])

    redis_url: Annotated[
        str, Meta(description="Redis for what gateways share; empty: none, and what needs it is refused.")
    ] = "redis://127.0.0.1:6379/0"
    redis_prefix: Annotated[str, Meta(description="Prefix of all Redis keys of the gateways.")] = "baton:gateway"
    redis_timeout_s: Annotated[Seconds, Meta(description="Longest wait for one answer of Redis.")] = 2.0

    responses_ttl_s: Annotated[
        float, Meta(ge=1, description="How long a response stays stored after its last use.")
    ] = 86400.0
    responses_bytes_max: Annotated[
        int,
        Meta(ge=1 << 20, description="Stored responses of one tenant together; those used least lately are deleted."),
    ] = 256 << 20

    idempotency_ttl_s: Annotated[
        float, Meta(ge=1, description="How long the answer to a request with an Idempotency-Key is kept.")
    ] = 3600.0

    body_bytes_max: Annotated[int, Meta(ge=1024, description="Longest request body.")] = 16 << 20
    bodies_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Total length of bodies over 256 KiB that are being received, or not yet tokenised; beyond "
            "this, 429. With more than one such body, a tenant gets no more than stays free.",
        ),
    ] = 256 << 20
    body_read_s: Annotated[Seconds, Meta(description="Time for a request's head to arrive, then for its body.")] = 30.0
    choices_max: Annotated[int, Meta(ge=1, le=1024, description="Most answers of one request: prompts times n.")] = 128
    unread_tokens_max: Annotated[
        int,
        Meta(ge=16, description="Unread tokens kept for a slow client; with more it is cut off."),
    ] = 8192
    send_timeout_s: Annotated[
        Seconds, Meta(description="A client that takes nothing for this long, while data waits for it, is cut off.")
    ] = 60.0
    model_defaults: Annotated[
        bool, Meta(description="Take sampling parameters that a request leaves out from generation_config.json.")
    ] = True
    answer_format: Annotated[
        FormatName,
        Meta(
            description="Format of reasoning and tool calls in answers; auto: found by the model's chat template, "
            "none: answers are text."
        ),
    ] = FormatName.AUTO
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="Take `chat_template` in requests, from trusted clients: a program, which runs in an intake "
            "process until the request's deadline, with as much memory as it takes."
        ),
    ] = False
    intake_processes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Processes that read and tokenise long bodies. Those of 256 KiB and more have one fewer of "
            "their own, at least one.",
        ),
    ] = 2
    intake_waiting_bytes_max: Annotated[
        int, Meta(ge=0, description="Total length of bodies that wait for either of these; beyond this, 429.")
    ] = 64 << 20
    stream_keep_alive_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Longest silence in a stream; then it gets a comment, the first with the status. 0: any.",
        ),
    ] = 15.0
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(description="Origins whose pages may call this server, such as https://chat.example; * for all."),
    ] = ()
    routing_headers: Annotated[
        bool, Meta(description="Name the workers of an answer in its headers, x-baton-prefill and x-baton-decode.")
    ] = False
    keep_alive_s: Annotated[int, Meta(ge=1, description="How long an idle connection stays open, in seconds.")] = 75
    drain_delay_s: Annotated[
        float, Meta(ge=0, description="Time after SIGTERM in which only /ready turns to 503, for a proxy to see.")
    ] = 0.0
    drain_s: Annotated[float, Meta(ge=0, description="Time for streams to finish after drain_delay_s.")] = 30.0

    def __post_init__(self) -> None:
        if not (is_loopback(self.host) or self.api_keys or self.stored_keys or self.allow_open):
            raise ValueError(
                f"other machines reach the host {self.host}, so give a key with api_keys (--api-keys, "
                "BATON_GATEWAY_API_KEYS), --stored-keys, or --allow-open, for a gateway behind a proxy that controls "
                "access"
            )
        if not self.redis_url and (self.stored_keys or any(tenant.is_limited for tenant in self.tenants.values())):
            raise ValueError("stored_keys and limits of tenants need Redis: give redis_url")
        unknown = set(self.tenants).difference(map(tenant_of, self.api_keys))
        if unknown:
            raise ValueError(f"the tenant {min(unknown)} has none of the API keys in api_keys")

    def default_objectives(self) -> Objectives:
        """Return the objectives of requests that state none."""
        return Objectives(
            ttft_s=self.ttft_ms / 1000,
            tpot_s=self.tpot_ms / 1000,
            admits_by_ttft=self.admit_by_objectives,
            admits_by_tpot=self.admit_by_objectives,
        )

    def attempt_timers(self) -> AttemptTimers:
        return AttemptTimers(
            place_resend_s=self.place_resend_s,
            place_resends_max=self.place_resends_max,
            accept_s=self.accept_s,
            first_token_s=self.first_token_s,
            progress_s=self.progress_s,
            resend_s=self.resend_s,
            admission_wait_s=self.admission_wait_s,
            attempts_max=self.attempts_max,
        )
