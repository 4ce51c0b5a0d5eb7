"""Buckets: JetStream key-value stores, as the `nats kv` command shows them, changed by compare-and-set.

The server numbers a bucket's revisions from 1, and starts again when it has lost its store. Our revisions begin
with the instant at which the bucket was created, so they always grow and can serve as fencing tokens.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from baton.bus.delivery import check_name, check_payload
from baton.bus.nats_requests import Requests
from baton.bus.nats_stream import NOT_FOUND, ApiAnswer, StoredMessage, ask_jetstream, call_api
from baton.bus.protocol import BusLimits, Entry
from baton.errors import BusUnavailable, Conflict
from baton.messages.codec import decode

_REVISION_BITS: Final = 40
_WRONG_REVISION: Final = frozenset({10071, 10164})
_DELETED: Final = b"KV-Operation: DEL"


class Buckets:
    """The buckets of one connection."""

    def __init__(self, requests: Requests, limits: BusLimits) -> None:
        self._requests = requests
        self._limits = limits

    async def get(self, bucket: str, key: str) -> Entry | None:
        first = await self._find_or_make(bucket)
        stored = await self._last(bucket, key)
        if stored is None or _DELETED in stored.hdrs:
            return None
        return Entry(decode(stored.data), first + stored.seq)

    async def put(self, bucket: str, key: str, payload: bytes, revision: int, *, deletes: bool = False) -> int:
        check_payload(payload, self._requests.client.max_payload)
        first = await self._find_or_make(bucket)
        expected = revision - first
        if not revision:
            # A deleted key leaves a marker, which counts as its last revision.
            stored = await self._last(bucket, key)
            expected = stored.seq if stored and _DELETED in stored.hdrs else 0
        if expected < 0:
            raise Conflict(f"the bucket {bucket} was recreated")
        headers = {"Nats-Expected-Last-Subject-Sequence": str(expected)}
        if deletes:
            headers |= {"KV-Operation": "DEL"}
        answer = await ask_jetstream(self._requests, f"$KV.{bucket}.{key}", payload, self._limits, headers)
        if answer.error is not None and answer.error.err_code in _WRONG_REVISION:
            raise Conflict(f"{key} in the bucket {bucket} has another revision by now")
        return first + _checked(answer, bucket).seq

    async def _last(self, bucket: str, key: str) -> StoredMessage | None:
        check_name(key)
        body: dict[str, object] = {"last_by_subj": f"$KV.{bucket}.{key}"}
        answer = await call_api(self._requests, f"STREAM.MSG.GET.KV_{bucket}", body, self._limits)
        if answer.error is not None and answer.error.err_code in NOT_FOUND:
            return None
        return _checked(answer, bucket).message

    async def _find_or_make(self, bucket: str) -> int:
        """Return the number that is added to the server's revisions of this bucket."""
        check_name(bucket)
        answer = await call_api(self._requests, f"STREAM.INFO.KV_{bucket}", {}, self._limits)
        if answer.error is not None and answer.error.err_code in NOT_FOUND:
            config: dict[str, object] = {
                "name": f"KV_{bucket}",
                "subjects": [f"$KV.{bucket}.>"],
                "storage": "file",
                "retention": "limits",
                "discard": "new",
                "max_msgs_per_subject": 1,
                "allow_rollup_hdrs": True,
                "deny_delete": True,
                "num_replicas": 1,
            }
            answer = await call_api(self._requests, f"STREAM.CREATE.KV_{bucket}", config, self._limits)
        # Digits beyond microseconds are cut off.
        made_at = datetime.fromisoformat(f"{_checked(answer, bucket).created[:26].rstrip('Z')}+00:00")
        return int(made_at.timestamp() * 1000) << _REVISION_BITS


def _checked(answer: ApiAnswer, bucket: str) -> ApiAnswer:
    if answer.error is not None:
        raise BusUnavailable(f"the bucket {bucket} cannot be used: {answer.error.description}")
    return answer
