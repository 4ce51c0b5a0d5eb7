"""Starts the gateway: `python -m baton_gateway --help`."""

from __future__ import annotations

import resource
import sys
from contextlib import aclosing
from functools import partial

from baton.node.service import Process, run
from baton.processes.group import ProcessGroup
from baton.redis import connected
from baton_gateway.api import make_app
from baton_gateway.config import Settings
from baton_gateway.intake_pool import ProcessPool
from baton_gateway.models import Models
from baton_gateway.server import LAST_WORDS_S, listen, make_server, reserve
from baton_gateway.service import Gateway
from baton_gateway.tokenise import load_to_stay


async def main(settings: Settings, process: Process) -> None:
    if settings.processes == 1:
        await serve(settings, process)
        return
    with reserve(settings) as reserved:
        group = process_group(settings, port=reserved.getsockname()[1])
        await process.serve(group, scrape=group.scrape)


def process_group(settings: Settings, *, port: int) -> ProcessGroup:
    """Return gateways with these settings that share a port."""
    # A flag's last value counts.
    flags = (*sys.argv[1:], "--processes", "1", "--port", str(port), "--reuse-port")
    return ProcessGroup(
        "gateway",
        (sys.executable, "-m", "baton_gateway", *flags),
        count=settings.processes,
        drain_timeout_s=settings.drain_delay_s + settings.drain_s + 2 * LAST_WORDS_S,
    )


async def serve(settings: Settings, process: Process) -> None:
    # A stream is an open file, and the usual soft limit is 1024: fewer than `requests_max`.
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    gateway_id = f"gw-{process.new_id()[:12]}"
    # The listener comes first, so that a port in use is found at once.
    with listen(settings) as listener:
        async with process.join(gateway_id) as node:
            intake = ProcessPool(
                clock=node.ports.clock,
                processes_max=settings.intake_processes,
                waiting_bytes_max=settings.intake_waiting_bytes_max,
                command=(
                    *(sys.executable, "-m", "baton_gateway.intake_process", settings.answer_format),
                    *("--log-level", settings.log_level, "--log-format", settings.log_format),
                ),
            )
            load = partial(load_to_stay, answer_format=settings.answer_format)
            async with (
                connected(settings.redis_url, clock=node.ports.clock, timeout_s=settings.redis_timeout_s) as redis,
                aclosing(Models(ports=node.ports, intake=intake, load=load)) as models,
            ):
                gateway = Gateway(settings, gateway=gateway_id, node=node, models=models, redis=redis)
                await process.serve(make_server(make_app(gateway), gateway, listener))


if __name__ == "__main__":
    run("gateway", Settings, main)
