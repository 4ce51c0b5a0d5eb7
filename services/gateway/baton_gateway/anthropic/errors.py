"""Errors in Anthropic's form. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from baton.errors import BatonError, Overloaded, Unavailable

PATH: Final = "/v1/messages"
OVERLOADED_STATUS: Final = 529
_TYPES: Final = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.METHOD_NOT_ALLOWED: "invalid_request_error",
    HTTPStatus.CONFLICT: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.UNPROCESSABLE_ENTITY: "invalid_request_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def is_messages(path: str) -> bool:
    """Return whether a path's clients expect Anthropic's form."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(error: BatonError) -> int:
    """Return Anthropic's status: full workers are its overload, and its only failure is the server's own."""
    if error.code == Overloaded.code or isinstance(error, Unavailable):
        return OVERLOADED_STATUS
    return error.http_status if error.http_status in _TYPES else HTTPStatus.INTERNAL_SERVER_ERROR


def error_body(error: BatonError, request_id: str | None = None) -> dict[str, Any]:
    described = {"type": _TYPES.get(status_of(error), "api_error"), "message": error.detail}
    return {"type": "error", "error": described, "request_id": request_id}
