"""ASGI middleware around every request: its id, its key, its limit, and the boundary for unexpected errors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError, Forbidden, Unauthenticated
from baton_gateway.answers import to_json
from baton_gateway.anthropic import errors as anthropic
from baton_gateway.bodies import REQUEST_NAME
from baton_gateway.drain_state import DrainState
from baton_gateway.openai_answers import error_body
from baton_gateway.tenants.keyring import Keyring
from baton_gateway.tenants.quotas import ANTHROPIC_LIMIT_HEADERS, Quotas

log = logging.getLogger(__name__)

REQUEST_ID: Final = re.compile(REQUEST_NAME)
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Paths that need no key, as probes carry none."""


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        quotas: Quotas,
        *,
        drain_state: Callable[[], DrainState],
        on_response: Callable[[str, int], None],
        new_id: Callable[[], str],
        origins: Collection[str] = (),
    ) -> None:
        """Wrap `app`. `on_response` is called with the path and the status of each response that begins.

        `origins`: other origins whose pages may send requests; `*` for all.
        """
        self._origins = frozenset(origins)
        self._new_id = new_id
        self._drain_state = drain_state
        self._app = app
        self._keyring = keyring
        self._quotas = quotas
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # HEAD is a GET whose body the server leaves out. None of our paths ends with a slash, nor does a model's name.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
        headers = headers_of(scope)
        presented = headers.get("x-request-id", "")
        request = self._new_id()
        request_id = presented if REQUEST_ID.fullmatch(presented) else request
        limit_headers: dict[str, str] = {}
        state = scope.setdefault("state", {})
        state.update(request=request, request_id=request_id, headers=headers, limit_headers=limit_headers)
        started = finished = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, finished
            if message["type"] == "http.response.start":
                started = True
                self._on_response(scope["path"], message["status"])
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if of_messages := anthropic.is_messages(scope["path"]):
                    MutableHeaders(scope=message)["request-id"] = request_id
                if limit_headers:
                    left_out = () if of_messages else ANTHROPIC_LIMIT_HEADERS
                    stated = {name: value for name, value in limit_headers.items() if name not in left_out}
                    MutableHeaders(scope=message).update(stated)
                if self._drain_state() is not DrainState.OPEN:
                    # The client must send its next request on another connection.
                    MutableHeaders(scope=message)["connection"] = "close"
            finished = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._drain_state().check_takes()
                if method == "POST" and (origin := headers.get("origin")) is not None:
                    self._check_origin(origin, headers.get("host", ""))
                access = state["access"] = await self._keyring.identify(headers)
                if method == "POST":
                    await self._quotas.take_request(access, limit_headers)
            await self._app(scope, receive, send_with_id)
        except BatonError as error:
            await error_response(error, scope)(scope, receive, send_with_id)
        except Exception:  # The boundary of every request: an unexpected error is a bug, and is logged as one.
            log.exception("request %s failed unexpectedly", request_id)
            if not started:
                await unexpected_response(scope)(scope, receive, send_with_id)
            elif not finished:
                raise  # Part of the answer is sent: uvicorn cuts the connection, so that the client notices.

    def _check_origin(self, origin: str, host: str) -> None:
        """Raise Forbidden for a page of another origin that is not allowed.

        Browsers send a plain POST without asking first; they only keep the answer from the page.
        """
        own = origin.partition("://")[2].lower() == host.lower()
        if not (own or origin in self._origins or "*" in self._origins):
            said = f"pages of the origin `{origin[:200]}` may not call this server: `--cors-origins` does not name it"
            raise Forbidden(said, param="Origin")


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the request's headers by lower-case name; of several, the first. Starlette's search the list each time."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def unexpected_response(scope: Scope) -> Response:
    """Return the answer to a request that met a bug; only the log has the details."""
    error = BatonError("the server failed unexpectedly; its log has the details under the request id")
    return error_response(error, scope)


def error_response(error: BatonError, scope: Scope) -> Response:
    """Return an error in the form that the clients of the request's path expect."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        # The header takes whole seconds only.
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    status, body = error.http_status, error_body(error)
    if anthropic.is_messages(scope["path"]):
        status, body = anthropic.status_of(error), anthropic.error_body(error, scope["state"]["request_id"])
    return Response(to_json(body), status_code=status, headers=headers, media_type="application/json")
