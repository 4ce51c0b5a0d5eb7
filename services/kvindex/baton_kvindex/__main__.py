"""`python -m baton_kvindex`: answers which worker holds which prefix."""

from __future__ import annotations

from baton.node.service import Process, run
from baton_kvindex.config import IndexSettings
from baton_kvindex.service import IndexService
from baton_kvindex.store import RedisStore


async def main(settings: IndexSettings, process: Process) -> None:
    async with process.join("kvindex") as node:
        store = None
        if settings.redis_url:
            store = RedisStore(
                settings.redis_url,
                clock=node.ports.clock,
                prefix=settings.redis_prefix,
                timeout_s=settings.redis_timeout_s,
            )
        await process.serve(IndexService(settings, node, store))


if __name__ == "__main__":
    run("kvindex", IndexSettings, main)
