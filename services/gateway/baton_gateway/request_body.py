"""Bodies of requests, received in parts and within bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from starlette.requests import Request

from baton.clock import Clock
from baton.errors import ClientGone, InvalidRequest, Overloaded, PayloadTooLarge
from baton_gateway.byte_shares import ByteShares

SMALL_BYTES: Final = 256 << 10
"""Length up to which a body is always received, however many long ones there are."""

Part = bytes | bytearray


class BodyReader:
    """Receives bodies. Long ones share a bounded number of bytes from their arrival until they are released."""

    def __init__(self, clock: Clock, *, body_bytes_max: int, bodies_bytes_max: int, timeout_s: float) -> None:
        self._clock = clock
        self._body_bytes_max = body_bytes_max
        self._timeout_s = timeout_s
        self.shares = ByteShares(bodies_bytes_max)
        """Lengths of all long bodies, as far as they have arrived."""

    async def read(self, request: Request, note: Callable[[Part], object] | None = None) -> Part:
        """Return the request's body, which is held until `release`; `note` gets each part as it comes.

        Raises ClientGone, InvalidRequest, Overloaded, and PayloadTooLarge as soon as it is certain.
        """
        self._check_head(request.state.headers)
        tenant = request.state.access.tenant
        body, more = b"", True
        try:
            async with self._clock.timeout(self._timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("the client disconnected while it sent the request")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if note is not None:
                        note(part)
                    body = self._joined(tenant, body, part)
        except TimeoutError as error:
            self.release(request, body)
            raise InvalidRequest(f"the body did not arrive within {self._timeout_s:g} s") from error
        except BaseException:
            self.release(request, body)
            raise
        return body

    def release(self, request: Request, body: Part) -> None:
        self.shares.take(request.state.access.tenant, -_counted(body))

    def _check_head(self, headers: Mapping[str, str]) -> None:
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise InvalidRequest(f"the body is sent as {encoding[:40]!r}; this server takes it unencoded only")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._body_bytes_max:
            raise self._too_large()

    def _joined(self, tenant: str, body: Part, part: Part) -> Part:
        """Return the body with its next part, counted. A body of one part is not copied."""
        length = len(body) + len(part)
        if length > self._body_bytes_max:
            raise self._too_large()
        more_bytes = (length if length > SMALL_BYTES else 0) - _counted(body)
        if more_bytes and not self.shares.fits(tenant, more_bytes, of_bytes=_counted(body)):
            raise Overloaded("too many long bodies are being received", retry_after_s=1.0)
        self.shares.take(tenant, more_bytes)
        if not body:
            return part
        joined = body if isinstance(body, bytearray) else bytearray(body)
        joined += part
        return joined

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is longer than the {self._body_bytes_max} bytes that this server takes")


def _counted(body: Part) -> int:
    return len(body) if len(body) > SMALL_BYTES else 0
