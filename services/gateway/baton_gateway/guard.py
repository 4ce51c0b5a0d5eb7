"""ASGI middleware around every request: its id, its key, and the boundary for unexpected errors."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError, Unauthenticated
from baton_gateway.answers import error_body, to_json
from baton_gateway.bodies import REQUEST_NAME
from baton_gateway.drain_state import DrainState
from baton_gateway.objectives import tenant_of

log = logging.getLogger(__name__)

REQUEST_ID: Final = re.compile(REQUEST_NAME)
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Paths that need no key, as probes carry none."""


class ApiKeys:
    """Checks API keys in constant time. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: str) -> str:
        """Return the tenant: a digest of the key that the header carries, empty if no keys are set.

        Raises Unauthenticated if keys are set and the header carries none of them.
        """
        if not self._digests:
            return ""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("this server asks for an API key: send it as `Authorization: Bearer KEY`")
        presented = hashlib.sha256(token.strip().encode()).digest()
        # All keys are compared, so that the time does not depend on which one matches.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not any(matches):
            raise Unauthenticated("the API key is not known to this server")
        return tenant_of(token.strip())


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        *,
        drain_state: Callable[[], DrainState],
        on_response: Callable[[str, int], None],
        new_id: Callable[[], str],
    ) -> None:
        """Wrap `app`. `on_response` is called with the path and the status of each response that begins."""
        self._new_id = new_id
        self._drain_state = drain_state
        self._app = app
        self._keys = keys
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
        scope.setdefault("state", {}).update(request=request, request_id=request_id, headers=headers)
        started = finished = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, finished
            if message["type"] == "http.response.start":
                started = True
                self._on_response(scope["path"], message["status"])
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if self._drain_state() is not DrainState.OPEN:
                    # The client must send its next request on another connection.
                    MutableHeaders(scope=message)["connection"] = "close"
            finished = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._drain_state().check_takes()
                scope["state"]["tenant"] = self._keys.check(headers.get("authorization", ""))
            await self._app(scope, receive, send_with_id)
        except BatonError as error:
            await error_response(error)(scope, receive, send_with_id)
        except Exception:  # The boundary of every request: an unexpected error is a bug, and is logged as one.
            log.exception("request %s failed unexpectedly", request_id)
            if not started:
                await unexpected_response()(scope, receive, send_with_id)
            elif not finished:
                raise  # Part of the answer is sent: uvicorn cuts the connection, so that the client notices.


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the request's headers by lower-case name; of several, the first. Starlette's search the list each time."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def unexpected_response() -> Response:
    """Return the answer to a request that met a bug; only the log has the details."""
    return error_response(BatonError("the server failed unexpectedly; its log has the details under the request id"))


def error_response(error: BatonError) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        # The header takes whole seconds only.
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Response(
        to_json(error_body(error)), status_code=error.http_status, headers=headers, media_type="application/json"
    )
