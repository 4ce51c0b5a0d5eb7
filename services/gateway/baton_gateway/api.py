"""HTTP API: OpenAI's endpoints, health and readiness."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from msgspec.json import schema_components
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import subjects
from baton.errors import BatonError, InvalidRequest
from baton.messages.decisions import NamedRequest
from baton.messages.placement import Disaggregation
from baton_gateway.answers import AnswerHead, Events, to_json
from baton_gateway.anthropic.bodies import MessagesBody
from baton_gateway.anthropic.events import MessageEvents
from baton_gateway.bodies import ChatBody, CompletionBody
from baton_gateway.conversion import Conversion, DetokenizeBody, TokenizeBody
from baton_gateway.generate import Job, RequestFacts, answer_conversion, prepare, prepare_here, prompt_heads
from baton_gateway.guard import Guard, error_response, unexpected_response
from baton_gateway.idempotency import HEADER, Once
from baton_gateway.idempotency_store import AnswerStore, RedisAnswers
from baton_gateway.intake import Operation
from baton_gateway.objectives import objectives_of
from baton_gateway.openai_answers import ChatFormat, CompletionFormat, EventWriter
from baton_gateway.request_body import Part
from baton_gateway.respond import AnswerResponse, while_connected
from baton_gateway.responses import endpoint
from baton_gateway.responses.bodies import ResponsesBody
from baton_gateway.responses.redis_store import RedisStore
from baton_gateway.responses.service import Responses
from baton_gateway.responses.store import ResponseStore
from baton_gateway.service import Gateway
from baton_gateway.tenants.quotas import ANTHROPIC_LIMIT_HEADERS, OPENAI_LIMIT_HEADERS
from baton_gateway.tenants.tenant import Access
from baton_gateway.tracing import RequestTrace, traced_request
from baton_gateway.workers import Model

DEADLINE_HEADER: Final = "x-baton-deadline-s"
DISAGGREGATION_HEADER: Final = "x-baton-disaggregation"
SESSION_HEADER: Final = "x-baton-session"
SCHEMAS: Final = "#/components/schemas/"
ERROR_SCHEMA: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
SERVED: Final = (
    "this server has /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /tokenize and "
    "/detokenize"
)
NOT_SERVED: Final = {
    "/v1/embeddings": "embeddings: it serves no embedding model",
    "/v1/images": "images",
    "/v1/audio": "audio: neither speech nor transcriptions nor translations",
    "/v1/videos": "videos",
    "/v1/realtime": "audio",
    "/v1/moderations": "moderations",
}
"""What is not served, by the beginning of its paths."""
CORS_METHODS: Final = ("GET", "POST", "DELETE")
CORS_EXPOSED: Final = (
    "x-request-id", "request-id", "retry-after", "x-baton-prefill", "x-baton-decode", *OPENAI_LIMIT_HEADERS,
    *ANTHROPIC_LIMIT_HEADERS,
)  # fmt: skip
"""Headers of answers that pages may read."""


class _NoRoute(InvalidRequest):
    code = "not_found"
    http_status = 404


class _NotServed(InvalidRequest):
    code = "not_served"


class _WrongMethod(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


def make_app(gateway: Gateway, store: ResponseStore | None = None, answers: AnswerStore | None = None) -> ASGIApp:
    """Return the application. Stores that are not given are in the gateway's Redis, if it has one."""
    app = FastAPI(
        title="Baton",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        responses={"default": {"description": "An error.", "content": {"application/json": {"schema": ERROR_SCHEMA}}}},
    )
    started_s = int(gateway.clock.wall_s())
    responses = Responses(gateway, store or _response_store(gateway))
    answers = answers or _answer_store(gateway)
    app.include_router(endpoint.make_router(responses))

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        await gateway.check_ready()
        return _json({"status": "ready"})

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        known, access = gateway.workers.models(), request.state.access
        listed = [_describe(model, started_s) for model in known if access.may_use(model.name)]
        return _json({"object": "list", "data": listed})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        request.state.access.check_model(name)
        return _json(_describe(gateway.workers.model(name), started_s))

    @app.post("/v1/chat/completions", openapi_extra=_body_reference(ChatBody))
    async def chat() -> Response:
        return GenerationResponse(gateway, "chat", int(gateway.clock.wall_s()))

    @app.post("/v1/completions", openapi_extra=_body_reference(CompletionBody))
    async def complete() -> Response:
        return GenerationResponse(gateway, "text_completion", int(gateway.clock.wall_s()))

    @app.post("/v1/messages", openapi_extra=_body_reference(MessagesBody))
    async def create_message() -> Response:
        return GenerationResponse(gateway, "messages", int(gateway.clock.wall_s()))

    @app.post("/v1/messages/count_tokens", openapi_extra=_body_reference(MessagesBody))
    async def count_tokens() -> Response:
        return GenerationResponse(gateway, "count_tokens", int(gateway.clock.wall_s()))

    @app.post(endpoint.PATH, openapi_extra=_body_reference(ResponsesBody))
    async def respond() -> Response:
        return GenerationResponse(gateway, "responses", int(gateway.clock.wall_s()), responses)

    async def convert(request: Request, conversion: Conversion) -> Response:
        payload = await gateway.bodies.read(request)
        try:
            work = answer_conversion(gateway, conversion, payload, request.state.access)
            return Response(await while_connected(request.receive, work), media_type="application/json")
        finally:
            gateway.bodies.release(request, payload)

    @app.post("/v1/tokenize", include_in_schema=False)
    @app.post("/tokenize", openapi_extra=_body_reference(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        return await convert(request, "tokenize")

    @app.post("/v1/detokenize", include_in_schema=False)
    @app.post("/detokenize", openapi_extra=_body_reference(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return await convert(request, "detokenize")

    _add_error_handlers(app)
    _describe_bodies(app)
    generation: dict[str, Operation] = {
        "/v1/chat/completions": "chat",
        "/v1/completions": "text_completion",
        "/v1/messages": "messages",
        endpoint.PATH: "responses",
    }

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        """Skip FastAPI's layers, a sixth of a short request's cost, for requests that they would only pass on."""
        operation = generation.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await app(scope, receive, send)
            return
        answer = GenerationResponse(gateway, operation, int(gateway.clock.wall_s()), responses)
        if HEADER not in scope["state"]["headers"]:
            await answer(scope, receive, send)
            return
        # Fed with each part as it comes: a body of 16 MiB at once would hold up every stream for 13 ms.
        digest = hashlib.sha256(scope["path"].encode() + b"\0")
        request = Request(scope, receive)
        held = [await gateway.bodies.read(request, digest.update)]

        def take() -> Part:
            """Return the body for good: `answer` reads and counts it again, and is done with it before it answers."""
            gateway.bodies.release(request, held[0])
            return held.pop()

        try:
            await Once(gateway, answers, answer).answer(take, digest.hexdigest(), scope, receive, send)
        finally:
            if held:
                take()

    guard = Guard(
        route,
        gateway.keyring,
        gateway.quotas,
        drain_state=lambda: gateway.drain_state,
        on_response=gateway.figures.responded,
        new_id=gateway.ports.new_id,
        origins=(origins := gateway.settings.cors_origins),
    )
    if not origins:
        return guard
    return CORSMiddleware(
        guard, allow_origins=origins, allow_methods=CORS_METHODS, allow_headers=["*"], expose_headers=CORS_EXPOSED
    )


class GenerationResponse(Response):
    """Reads, checks and answers one generation request, under one span from its first byte to its last."""

    def __init__(
        self, gateway: Gateway, operation: Operation, created_s: int, responses: Responses | None = None
    ) -> None:
        super().__init__()
        self._responses = responses
        self._gateway = gateway
        self._operation: Operation = operation
        self._created_s = created_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, request = self._gateway, Request(scope, receive)
        figures, tracing = gateway.figures, gateway.tracing
        with traced_request(
            tracing, gateway.publisher, gateway.clock, self._operation, request, figures.note_request
        ) as trace:
            facts = _facts_of(gateway, request, self._operation, trace)
            creation: endpoint.ResponseCreation | None = None
            if self._responses is not None and self._operation == "responses":
                creation = endpoint.ResponseCreation(gateway, self._responses, facts, trace)
            with tracing.span("read", parent=trace.trace):
                payload = await gateway.bodies.read(request)
            try:
                if creation is not None:
                    job = await creation.prepare(payload, receive)
                else:
                    job = prepare_here(gateway, payload, facts)
                    if job is None:
                        job = await while_connected(receive, prepare(gateway, payload, facts))
            finally:
                gateway.bodies.release(request, payload)
                del payload  # An answer takes longer than its request.
            if creation is not None:
                await creation.answer(job, scope, receive, send)
                return
            if self._operation == "count_tokens":
                await _json({"input_tokens": job.prompt_tokens})(scope, receive, send)
                return
            plan = job.plan
            events = _events_of(self._operation, job, self._created_s)
            for name in {str(request.state.request_id), plan.name}.difference((job.request, "")):
                gateway.publisher.post(subjects.request_name(name), NamedRequest(request=job.request))
            trace.accept(job.model, plan, request=job.request, response=events.id, prompt_tokens=job.prompt_tokens)
            answer = AnswerResponse(gateway, job, events, trace, stream=plan.stream)
            await answer(scope, receive, send)


def _events_of(operation: Operation, job: Job, created_s: int) -> Events:
    plan = job.plan
    head = AnswerHead(
        request=job.request,
        model=job.model,
        created_s=created_s,
        with_usage=plan.with_usage,
        with_logprobs=plan.output.logprobs,
        with_token_ids=plan.output.token_ids,
        tokens_as_ids=plan.tokens_as_ids,
        with_counts=plan.output.counts,
        prompts=prompt_heads(job),
    )
    if operation == "messages":
        return MessageEvents(head, job.prompt_tokens)
    shape = ChatFormat(head) if operation == "chat" else CompletionFormat(head)
    return EventWriter(shape, detailed=plan.output.is_detailed, with_usage=plan.with_usage)


def _facts_of(gateway: Gateway, request: Request, operation: Operation, trace: RequestTrace) -> RequestFacts:
    """Return the facts in the headers. Raises InvalidRequest that names the header."""
    headers: Mapping[str, str] = request.state.headers
    deadline_s = gateway.settings.deadline_s
    if (asked := headers.get(DEADLINE_HEADER)) is not None:
        try:
            asked_s = float(asked)
        except ValueError:
            asked_s = math.nan
        if not (math.isfinite(asked_s) and asked_s > 0):
            raise InvalidRequest(f"`{DEADLINE_HEADER}` must be a number of seconds above 0", param=DEADLINE_HEADER)
        deadline_s = min(deadline_s, asked_s)
    disaggregation: Disaggregation | None = None
    if (wanted := headers.get(DISAGGREGATION_HEADER)) is not None:
        try:
            disaggregation = Disaggregation(wanted)
        except ValueError as error:
            known = ", ".join(Disaggregation)
            raise InvalidRequest(
                f"`{DISAGGREGATION_HEADER}` must be one of {known}", param=DISAGGREGATION_HEADER
            ) from error
    access: Access = request.state.access
    objectives = objectives_of(headers, access.rights, gateway.settings.default_objectives())
    now_s = gateway.clock.now_s()
    return RequestFacts(
        request=request.state.request,
        received_at_s=now_s,
        deadline_at_s=now_s + deadline_s,
        disaggregation=disaggregation,
        session=headers.get(SESSION_HEADER, ""),
        operation=operation,
        trace=trace.trace,
        access=access,
        limit_headers=request.state.limit_headers,
        objectives=objectives,
    )


def _response_store(gateway: Gateway) -> ResponseStore | None:
    settings = gateway.settings
    if gateway.redis is None:
        return None
    return RedisStore(
        gateway.redis,
        clock=gateway.clock,
        prefix=settings.redis_prefix,
        ttl_s=settings.responses_ttl_s,
        bytes_max=settings.responses_bytes_max,
    )


def _answer_store(gateway: Gateway) -> AnswerStore | None:
    settings = gateway.settings
    if gateway.redis is None:
        return None
    return RedisAnswers(gateway.redis, prefix=settings.redis_prefix, ttl_s=settings.idempotency_ttl_s)


def _describe(model: Model, created_s: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "baton",
        # Clients of vLLM's server read this field as the model's id.
        "root": model.name,
        "max_model_len": model.context_tokens_max,
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")


def _body_reference(kind: type) -> dict[str, Any]:
    schema = {"$ref": f"{SCHEMAS}{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the bodies to the OpenAPI document: they are parsed by hand, so FastAPI does not know them."""
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(_body_schemas())


@cache
def _body_schemas() -> Mapping[str, Any]:
    """Return the schemas of the bodies, by name. Kept, as hundreds of tests make an application in one process."""
    _, described = models_json_schema(
        [(kind, "validation") for kind in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)],
        ref_template=SCHEMAS + "{model}",
    )
    _, messages = schema_components([MessagesBody], ref_template=SCHEMAS + "{name}")
    return described["$defs"] | messages


def _methods_of(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods that a path takes: it may have a route for each."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in route.methods or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(BatonError)
    async def expected(request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError)
        return error_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        if lacking := next((said for path, said in NOT_SERVED.items() if request.url.path.startswith(path)), ""):
            return error_response(_NotServed(f"this server has no {lacking}"), request.scope)
        if error.status_code == HTTPStatus.NOT_FOUND:
            return error_response(_NoRoute(f"there is no {where} here; {SERVED}"), request.scope)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response = error_response(_WrongMethod(f"{where} is not allowed"), request.scope)
            response.headers["allow"] = ", ".join(_methods_of(app, request.scope))
            return response
        return error_response(InvalidRequest(str(error.detail)), request.scope)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _error: Exception) -> Response:
        return unexpected_response(request.scope)  # Starlette raises the error again after this, for the guard to log.

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first: dict[str, Any] = error.errors()[0]
        param, said = str(first["loc"][-1]), str(first["msg"])
        return error_response(InvalidRequest(f"`{param}`: {said[0].lower()}{said[1:]}", param=param), request.scope)
