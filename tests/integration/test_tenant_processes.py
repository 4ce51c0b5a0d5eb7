"""Tenants over processes: limits that gateways share, Redis killed and back, caches apart, and keys in no output."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import nats
from nats.aio.msg import Msg

from baton.cli.servers import free_port
from baton.clock import SystemClock
from baton.messages.workers import Role
from baton.redis import RedisConnection
from tests.harness.cluster import running_cluster
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.process import actors, gateway, wait_ready
from tests.harness.limits import HANG_S
from tests.harness.servers import start_redis

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
PROMPT = "All that is gold does not glitter, not all those who wander are lost. " * 12


class Keys:
    """`baton keys` as an operator uses it."""

    def __init__(self, redis_url: str) -> None:
        self._environ = {**os.environ, "REDIS_URL": redis_url}
        self.shown: list[str] = []

    async def run(self, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton.cli", "keys", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environ,
        )
        out, _ = await process.communicate()
        return process.returncode or 0, out.decode()

    async def create(self, tenant: str, *flags: str) -> str:
        status, out = await self.run("create", "--tenant", tenant, *flags)
        assert status == 0, out
        (key,) = re.findall(r"^sk-baton-[0-9a-f]{64}$", out, re.MULTILINE)
        return key

    async def list(self) -> dict[str, dict[str, Any]]:
        """Return the keys by tenant."""
        status, out = await self.run("list", "--json")
        assert status == 0, out
        self.shown.append(out)
        return {each["tenant"]: each for each in json.loads(out)}


async def post(
    client: httpx.AsyncClient, key: str, body: dict[str, Any] = CHAT, path: str = "/v1/chat/completions"
) -> httpx.Response:
    return await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds():  # noqa: ASYNC110 - another process.
            await asyncio.sleep(0.05)


async def metric(client: httpx.AsyncClient, port: int, name: str) -> float:
    shown = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    (value,) = re.findall(rf"^{name} (\S+)$", shown, re.MULTILINE)
    return float(value)


async def test_gateways_share_limits_and_do_without_redis_as_wanted(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(start_redis())
        await stack.enter_async_context(actors(nats_url))
        keys = Keys(redis.url)
        logs: dict[str, list[bytes]] = {"open": [], "closed": []}
        ports = {name: free_port() for name in logs}
        flags = ("--stored-keys", "--redis-url", redis.url, "--redis-timeout-s", "10")
        clients: dict[str, httpx.AsyncClient] = {}
        for name, output in logs.items():
            own = ("--without-redis", name, "--status-port", str(ports[name]))
            _, url = await stack.enter_async_context(gateway(nats_url, *flags, *own, output=output))
            clients[name] = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        for client in clients.values():
            await wait_ready(str(client.base_url))

        def has_said(name: str, text: str) -> bool:
            return text in b"".join(logs[name]).decode()

        # One limit, whichever gateway is asked. A request of it is refilled in 10 s.
        limited = await keys.create("limited", "--requests-per-minute", "6")
        free = await keys.create("free")
        began_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(post(client, limited) for client in [*clients.values()] * 6))
        refilled = int((asyncio.get_running_loop().time() - began_s) / 10)
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses.keys() == {200, 429}
        assert 6 <= statuses[200] <= 6 + refilled
        assert all(1 <= int(each.headers["retry-after"]) <= 10 for each in answers if each.status_code == 429)
        usage: dict[str, int] = {}
        async with asyncio.timeout(HANG_S):
            while usage.get("requests") != statuses[200]:
                usage = (await keys.list())["limited"]["usage"]
        tokens = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
        assert usage["prompt_tokens"] == sum(each["prompt_tokens"] for each in tokens)
        assert usage["output_tokens"] == sum(each["completion_tokens"] for each in tokens)

        # Redis dies: one gateway goes on without limits, the other refuses what it cannot check.
        assert [(await post(client, free)).status_code for client in clients.values()] == [200, 200]
        redis.kill()
        assert [(await post(clients["open"], limited)).status_code for _ in range(8)] == [200] * 8
        refused = await post(clients["closed"], limited)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "store_unavailable"
        for name in logs:
            await until(lambda name=name: has_said(name, f"--without-redis {name}"))
            assert await metric(clients[name], ports[name], "baton_tenant_store_up") == 0
        assert await metric(clients["open"], ports["open"], "baton_rate_unchecked_total") == 8

        # And returns: both enforce again, by themselves.
        redis.start()
        async with asyncio.timeout(HANG_S):
            while {(await post(client, limited)).status_code for client in clients.values()} != {429}:
                pass
        for name in logs:
            await until(lambda name=name: has_said(name, "Redis serves again"))
            assert await metric(clients[name], ports[name], "baton_tenant_store_up") == 1

        # Revocation reaches both.
        status, said = await keys.run("revoke", (await keys.list())["free"]["id"])
        assert status == 0, said
        async with asyncio.timeout(HANG_S):
            while {(await post(client, free)).status_code for client in clients.values()} != {401}:
                pass


@asynccontextmanager
async def sniffed(nats_url: str) -> AsyncGenerator[list[bytes]]:
    """Collect all that the bus carries."""
    carried: list[bytes] = []

    async def take(message: Msg) -> None:
        carried.append(message.subject.encode() + b" " + message.data)

    connection = await cast("Any", nats).connect(nats_url)
    try:
        await connection.subscribe(">", cb=take)
        yield carried
    finally:
        await connection.close()


async def test_tenants_share_no_cache_and_no_output_has_a_key(tmp_path: Path, model: Path) -> None:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(tmp_path, model=model))
        carried = await stack.enter_async_context(sniffed(cluster.nats_url))
        await cluster.start_control_plane(
            gateway_flags=("--stored-keys", "--api-keys", "static-key-in-the-settings", "--place-resend-s", "5")
        )
        for role, name in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
            await cluster.start_worker(role, name)
        await cluster.wait_ready()
        keys = Keys(cluster.redis_url)
        one, two = await keys.create("one"), await keys.create("two", "--tokens-per-minute", "100000")
        shared = [await keys.create(name, "--allow", "share-prefix-cache") for name in ("three", "four")]

        client = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S))

        async def cached(key: str) -> int:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            answer = await post(client, key, body, "/v1/completions")
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] > 200
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert await cached(one) == 0
        assert await cached(one) > 200, "its own prompt is cached"
        for other in (two, "static-key-in-the-settings", shared[0]):
            assert await cached(other) == 0, "the prompt of another tenant is not"
        assert await cached(shared[1]) > 200, "tenants may share by permission"
        for wrong in ("sk-baton-wrong-key", "static-key-in-the-settingsX"):
            assert (await post(client, wrong)).status_code == 401
        shown = [(await client.get(f"http://{cluster.status_address(name)}/metrics")).text for name in cluster.services]
        await keys.list()
        known = [one, two, *shared, "static-key-in-the-settings", "sk-baton-wrong-key"]
        secrets = [form for key in known for form in (key, key.removeprefix("sk-baton-"))]
        assert any("baton_tenant_tokens_total{" in text and 'tenant="one"' in text for text in shown)
        outputs = {
            "logs": [service.log.read_text(errors="replace") for service in cluster.services.values()],
            "metrics": shown,
            "messages": [message.decode(errors="replace") for message in carried],
            "baton keys list": keys.shown,
            "Redis": appended(await appended_folder(cluster.redis_url)),
        }
        for name, texts in outputs.items():
            assert texts
            found = [secret for secret in secrets for text in texts if secret in text]
            assert not found, f"{name} have keys"


async def appended_folder(url: str) -> Path:
    connection = RedisConnection(url, clock=SystemClock(), timeout_s=10.0)
    folder = (await cast("Any", connection.client).config_get("dir"))["dir"]
    await connection.close()
    return Path(folder)


def appended(folder: Path) -> list[str]:
    """Return all that a Redis has been told to write, from its append-only file."""
    return [path.read_text(errors="replace") for path in folder.rglob("*.aof")]
