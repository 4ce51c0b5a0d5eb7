"""An agent in a process of its own. It prints its endpoint first, then takes one command per line.

Arguments: backends (comma-separated; `GPU_AGENT`: a `GpuAgent`), lease TTL in seconds, maximum bytes of a file it
may write (0: no limit), further options of the agent as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable

from transfer_rig import BLOCK_TOKENS, OPTIONS, SOURCE_BLOCKS, Node, make_gpu_agent

from baton.pool.gpu_agent import DIRECT_BACKENDS
from baton.transfer import AgentOptions, NativeAgent

GPU_AGENT = "gpu"


def main(backends: str, lease_ttl_s: str, file_bytes_max: str, fabric: str) -> None:
    if int(file_bytes_max):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_bytes_max), int(file_bytes_max)))
    options = AgentOptions(
        secret=OPTIONS.secret,
        backends=tuple(backends.split(",")),
        chunk_bytes=OPTIONS.chunk_bytes,
        lease_ttl_s=float(lease_ttl_s),
        **json.loads(fabric),
    )
    is_gpu = backends == GPU_AGENT
    gpu_library = options.gpu_library if is_gpu or options.backends[0] in DIRECT_BACKENDS else None
    agent = make_gpu_agent(options, len(SOURCE_BLOCKS)) if is_gpu else NativeAgent(options)
    node = Node(agent, shared=options.backends == ("direct",), gpu_library=gpu_library)

    def lease(key: str, blocks: str, seed: str) -> None:
        indexes = [int(block) for block in blocks.split(",")]
        node.fill(indexes, int(seed))
        node.lease(bytes.fromhex(key), indexes)

    def ready(key: str, layer: str, tokens: str) -> None:
        agent.post_ready(bytes.fromhex(key), 1, int(layer), int(tokens))

    def pull(key: str, endpoint: str, blocks: str) -> None:
        indexes = [int(block) for block in blocks.split(",")]
        tokens = len(indexes) * BLOCK_TOKENS
        agent.pull(bytes.fromhex(key), endpoint, first_token=0, tokens=tokens, blocks=indexes, budget_s=30.0)

    def leases() -> int:
        return agent.stats().leases

    commands: dict[str, Callable[..., int | None]] = {"lease": lease, "ready": ready, "pull": pull, "leases": leases}
    print(agent.endpoint, flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        answer = commands[name](*arguments)
        print("ok" if answer is None else answer, flush=True)
    agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
