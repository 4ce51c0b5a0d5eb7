"""Every failure that Baton expects, as one tree.

BatonError
├── InvalidRequest              400  the client sent something that cannot be served
│   ├── ContextLengthExceeded   400
│   └── PayloadTooLarge         413
├── RequestStopped              422  workers were lost just after they began this request; it is not tried again
├── Unauthenticated             401
├── Forbidden                   403  the API key is known and may not do this
├── ModelNotFound               404
├── RateLimited                 429  the API key has used what it may per minute; carries retry_after_s
├── Overloaded                  429  every worker that could serve is full; carries retry_after_s
├── ClientGone                  499  the client closed the connection before the answer was complete
├── Unavailable                 503  nothing can serve this now
│   ├── NoWorkers               503  no live worker of the role needed
│   ├── NoResponders            503  a bus subject has no subscriber
│   ├── BusUnavailable          503  the message bus cannot be reached
│   ├── StoreUnavailable        503  the database cannot be reached or refuses to write
│   └── RetriesLimited          503  the attempt failed, and too many others do; carries retry_after_s
├── Conflict                    409  another writer changed the entry first
├── DeadlineExceeded            504  the request's budget is spent
├── AttemptFailed               502  one attempt ended without an answer; the gateway may retry
│   ├── WorkerLost              502  a worker died, stalled or was restarted
│   ├── TransferFailed          502  the KV cache did not arrive whole and verified
│   │   ├── PeerUnreachable     502  two agents cannot reach each other
│   │   ├── LayoutMismatch      502  one KV layout cannot be converted into the other
│   │   └── ModelMismatch       502  two engines differ in model, weights, RoPE, or type or scales of their KV
│   ├── EngineFailed            502  the engine ended the request with an error
│   └── NotResumable            502  the client has part of the answer, and the rest cannot be continued exactly
├── MalformedMessage            500  bytes from the bus or a peer that are not a valid message
└── ConfigurationError          500  a setting is unknown or malformed; stops the start

Expected failures are raised and sent as these; anything else is a bug. A failure crosses the bus as
an `ErrorReport` (`code` and `detail`) and is raised again on the far side by `error_from_code`.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """A failure that Baton expects. `str(error)` is a sentence for the user."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, detail: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(BatonError):
    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"
    http_status = 413


class RequestStopped(BatonError):
    # Client libraries try again after 5xx, 408, 409 and 429; this request would end more workers.
    code = "request_stopped"
    http_status = 422
    openai_type = "invalid_request_error"


class Unauthenticated(BatonError):
    code = "invalid_api_key"
    http_status = 401
    openai_type = "authentication_error"


class Forbidden(BatonError):
    code = "permission_denied"
    http_status = 403
    openai_type = "permission_error"


class ModelNotFound(BatonError):
    code = "model_not_found"
    http_status = 404
    openai_type = "invalid_request_error"


class RateLimited(BatonError):
    code = "rate_limit_exceeded"
    http_status = 429
    openai_type = "rate_limit_error"


class Overloaded(BatonError):
    code = "overloaded"
    http_status = 429
    openai_type = "rate_limit_error"


class ClientGone(BatonError):
    code = "client_gone"
    http_status = 499


class Unavailable(BatonError):
    code = "unavailable"
    http_status = 503


class NoWorkers(Unavailable):
    code = "no_workers"


class NoResponders(Unavailable):
    code = "no_responders"


class BusUnavailable(Unavailable):
    code = "bus_unavailable"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class RetriesLimited(Unavailable):
    code = "retries_limited"


class Conflict(BatonError):
    code = "conflict"
    http_status = 409


class DeadlineExceeded(BatonError):
    code = "deadline_exceeded"
    http_status = 504
    openai_type = "timeout_error"


class AttemptFailed(BatonError):
    code = "attempt_failed"
    http_status = 502


class WorkerLost(AttemptFailed):
    code = "worker_lost"


class TransferFailed(AttemptFailed):
    code = "transfer_failed"


class PeerUnreachable(TransferFailed):
    code = "peer_unreachable"


class LayoutMismatch(TransferFailed):
    code = "layout_mismatch"


class ModelMismatch(TransferFailed):
    code = "model_mismatch"


class EngineFailed(AttemptFailed):
    code = "engine_failed"


class NotResumable(AttemptFailed):
    code = "not_resumable"


class MalformedMessage(BatonError):
    code = "malformed_message"


class ConfigurationError(BatonError):
    code = "configuration_error"


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {kind.code: kind for kind in _tree(BatonError)}


def error_from_code(
    code: str, detail: str, *, retry_after_s: float | None = None, param: str | None = None
) -> BatonError:
    """Return the error that `code` names; a code of a newer version becomes a plain `BatonError`."""
    return _BY_CODE.get(code, BatonError)(detail, retry_after_s=retry_after_s, param=param)
