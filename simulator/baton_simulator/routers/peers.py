"""The peers' routers with their defaults, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from baton_simulator.routers.aibrix import Aibrix, AibrixOptions
from baton_simulator.routers.dynamo import Dynamo, DynamoOptions
from baton_simulator.routers.least_loaded import LeastLoaded
from baton_simulator.routers.protocol import Router, WorkerSpec
from baton_simulator.routers.round_robin import RoundRobin
from baton_simulator.routers.sglang import SGLANG, Sglang
from baton_simulator.routers.sticky import Sticky
from baton_simulator.routers.vllm import VLLM, Vllm
from baton_simulator.routers.vllm_kv_aware import VllmKvAware

PEERS: Mapping[str, Callable[[Sequence[WorkerSpec], Random], Router]] = {
    "round-robin": lambda workers, random: RoundRobin(workers, None, random),
    "least-loaded": lambda workers, random: LeastLoaded(workers, None, random),
    "sticky": lambda workers, random: Sticky(workers, None, random),
    "sglang": lambda workers, random: Sglang(workers, SGLANG, random),
    "vllm": lambda workers, random: Vllm(workers, VLLM, random),
    "vllm-kv-aware": lambda workers, random: VllmKvAware(workers, None, random),
    "aibrix": lambda workers, random: Aibrix(workers, AibrixOptions(), random),
    "dynamo": lambda workers, random: Dynamo(workers, DynamoOptions(), random),
}
