"""`baton keys`: makes, lists and revokes the API keys that gateways with `--stored-keys` take."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from baton.cli.asking import find_redis_url, table
from baton.clock import SystemClock
from baton.errors import InvalidRequest
from baton.node.ports import new_system_id
from baton_gateway.tenants.keys import KEY_PREFIX, KeyRecord, digest_of
from baton_gateway.tenants.tenant import Permission, Tenant

if TYPE_CHECKING:
    from baton_gateway.tenants.store import KeyReport, TenantStore

SUMMARY: Final = "create, list and revoke API keys"
TIMEOUT_S: Final = 5.0

Answer = TypeVar("Answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "API keys are kept in Redis, as digests. Gateways that run with --stored-keys take them (`baton up "
        "--stored-keys`); a key works at once, and a revoked one is refused by every gateway within 5 s "
        "(--keys-kept-s of the gateway). docs/tenants.md says what limits and permissions mean."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    create = actions.add_parser("create", help="make a key and print it, once", allow_abbrev=False)
    add = create.add_argument
    add("--tenant", required=True, metavar="NAME", help="owner of the key; keys of one tenant share caches and weight")
    add("--models", default="", metavar="A,B", help="models that it may use; default: all")
    add("--requests-per-minute", metavar="N", help="over all gateways; default: no limit")
    add("--tokens-per-minute", metavar="N", help="prompt and output together; default: no limit")
    add("--weight", metavar="X", help="share of the workers while requests wait; default: 1")
    add("--priority", metavar="N", help="earliest class of its requests, 1 (first) to 7; default: 1")
    add("--ttft-ms", metavar="X", help="TTFT objective; default: the deployment's")
    add("--tpot-ms", metavar="X", help="TPOT objective; default: the deployment's")
    add("--allow", default="", metavar="A,B", help=f"permissions: {', '.join(Permission)}")
    listing = actions.add_parser("list", help="show all keys, what they may do and have used", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print JSON")
    revoke = actions.add_parser("revoke", help="have a key refused from now on", allow_abbrev=False)
    salt = actions.add_parser("salt", help="print the cache salt of a key's tenant, a secret", allow_abbrev=False)
    for action in (revoke, salt):
        action.add_argument("id", help="id of the key, as `baton keys list` shows it")
    for action in (create, listing, revoke, salt):
        add = action.add_argument
        add(
            "--port", type=int, default=8000, help="the `baton up` whose Redis it is, by its port; default: %(default)s"
        )
        add("--redis-url", default="", metavar="URL", help="Redis of another deployment; default: REDIS_URL")
        add("--redis-prefix", default="baton:gateway", metavar="TEXT", help="as of the gateway; default: %(default)s")
        add("--folder", type=Path, default=Path(), metavar="DIR", help="where `baton up` runs; default: here")


def run(parsed: argparse.Namespace) -> int:
    url = find_redis_url(parsed.redis_url, os.environ, parsed.folder.absolute() / ".run" / str(parsed.port))

    def ask(command: Callable[[TenantStore], Awaitable[Answer]]) -> Answer:
        return asyncio.run(_ask(url, parsed.redis_prefix, command))

    match parsed.action:
        case "create":
            rights = rights_of(vars(parsed))
            key, record = ask(lambda store: create(store, tenant=parsed.tenant, rights=rights))
            print(
                f"{key}\n\nThis is the only time that the key is shown. Its id is {record.id}.\n"
                "Gateways take it with the setting stored_keys only (`make up STORED_KEYS=1`)."
            )
        case "list":
            reports = ask(lambda store: store.report())
            shown = [described(report) for report in reports]
            print(json.dumps(shown, indent=2) if parsed.json else as_text(shown))
        case "revoke":
            record = ask(lambda store: revoke(store, parsed.id))
            print(f"The key {record.id} of {record.tenant} is revoked.")
        case _:
            record = ask(lambda store: find(store, parsed.id))
            print(record.salt)
    return 0


async def _ask(url: str, prefix: str, command: Callable[[TenantStore], Awaitable[Answer]]) -> Answer:
    # Imported here because every `baton` imports this module, and not every one has Redis's client.
    from baton.redis import RedisConnection
    from baton_gateway.tenants.store import RedisTenantStore

    redis = RedisConnection(url, clock=SystemClock(), timeout_s=TIMEOUT_S)
    try:
        return await command(RedisTenantStore(redis, prefix=prefix))
    finally:
        await redis.close()


def rights_of(flags: Mapping[str, str | None]) -> Tenant:
    """Return the rights that the flags state. Raises InvalidRequest that names the flag."""
    names = ("requests_per_minute", "tokens_per_minute", "weight", "priority", "ttft_ms", "tpot_ms")
    given: dict[str, Any] = {name: value for name in names if (value := flags.get(name)) is not None}
    given["models"] = _parts(flags.get("models"))
    given["permissions"] = _parts(flags.get("allow"))
    try:
        rights = msgspec.convert(given, Tenant, strict=False)
    except msgspec.ValidationError as error:
        hint = f"; choose permissions from {', '.join(Permission)}" if "$.permissions" in str(error) else ""
        raise InvalidRequest(f"the key's rights are malformed: {error}{hint}") from error
    for name in ("requests_per_minute", "tokens_per_minute"):
        # In a record 0 stands for no limit; a user who gives it means the opposite.
        if name in given and not getattr(rights, name):
            flag = f"--{name.replace('_', '-')}"
            raise InvalidRequest(f"{flag} is 0, which would let nothing pass: leave the flag out for no limit")
    return rights


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


async def create(store: TenantStore, *, tenant: str, rights: Tenant) -> tuple[str, KeyRecord]:
    """Make a key; return it and its record. Raises InvalidRequest."""
    key = KEY_PREFIX + new_system_id() + new_system_id()
    fields = {
        "digest": digest_of(key),
        "tenant": tenant,
        "rights": rights,
        "created_s": SystemClock().wall_s(),
        "salt_key": await store.salt_key(new_system_id()),
    }
    try:
        record = msgspec.convert(fields, KeyRecord)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"the tenant's name `{tenant[:200]}` must be 1 to 64 letters, digits, dots, dashes or underscores"
        ) from error
    await store.put(record)
    return key, record


async def revoke(store: TenantStore, key: str) -> KeyRecord:
    """Revoke a key and return its record; one that is revoked keeps its date. Raises InvalidRequest."""
    record = await find(store, key)
    if record.revoked_s is None:
        record = msgspec.structs.replace(record, revoked_s=SystemClock().wall_s())
        await store.put(record)
    return record


async def find(store: TenantStore, key: str) -> KeyRecord:
    """Return a key's record. Raises InvalidRequest if there is none."""
    record = await store.find(key)
    if record is None:
        raise InvalidRequest(f"there is no API key with the id `{key[:200]}`: `baton keys list` shows all")
    return record


def described(report: KeyReport) -> dict[str, Any]:
    """Return a key without its secrets."""
    record = report.record
    return {
        "id": record.id,
        "tenant": record.tenant,
        "created": _date(record.created_s),
        "revoked": _date(record.revoked_s),
        "last_used": _date(report.last_used_s),
        "rights": msgspec.to_builtins(record.rights, order="deterministic"),
        "usage": msgspec.to_builtins(report.usage),
    }


def as_text(keys: list[dict[str, Any]]) -> str:
    header = ("id", "tenant", "created", "revoked", "last used", "rights", "requests", "prompt", "cached", "output")
    rows = [
        (
            *(key["id"], key["tenant"], key["created"], key["revoked"] or "-", key["last_used"] or "-"),
            _differences(key["rights"]),
            *(str(key["usage"][name]) for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens")),
        )
        for key in keys
    ]
    return "\n".join(table(header, rows)) or "There is no API key: `baton keys create --tenant NAME` makes one."


def _differences(rights: Mapping[str, Any]) -> str:
    """Return the rights that differ from those of a key without any flag."""
    default = msgspec.to_builtins(Tenant())
    shown = [
        f"{name}={','.join(cast('list[str]', value)) if isinstance(value, list | tuple) else value}"
        for name, value in rights.items()
        if value != default[name]
    ]
    return " ".join(shown) or "-"


def _date(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
