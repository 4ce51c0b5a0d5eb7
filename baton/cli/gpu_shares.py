"""Which GPUs each worker of a machine computes on, and its share of their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from baton.devices.gpus import Gpu
from baton.errors import ConfigurationError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
RANK_OPTIONS: Final = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    gpus: tuple[int, ...] = ()
    """Numbers by PCI address; empty: those that CUDA chooses."""
    workers: int = 1
    """Workers that share them, this one included."""

    def environment(self) -> Mapping[str, str]:
        """Return the variables that show a worker these GPUs only."""
        if not self.gpus:
            return {}
        # CUDA's own order puts the fastest first, which is not the driver's.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(map(str, self.gpus))}


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[int, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names; None: all. Raises ConfigurationError.

    `gpus` are none where they are not known; then nor are these.
    """
    if visible is None or not gpus:
        return tuple(gpu.index for gpu in gpus)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"{VISIBLE} is set and names no GPU: name some, or choose DEVICE=cpu")
    return tuple(_find(gpus, name) for name in names)


def _find(gpus: Sequence[Gpu], name: str) -> int:
    found = [gpu.index for gpu in gpus if str(gpu.index) == name or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise ConfigurationError(f"{VISIBLE} names {name}, which is not one GPU of this machine; they are: {known}")


def ranks_of(engine: str, options: Mapping[str, object]) -> int:
    """Return the GPUs that a worker of this engine needs. Raises ConfigurationError if the option is malformed."""
    name = RANK_OPTIONS.get(engine, "")
    ranks = options.get(name, 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigurationError(f"the engine option {name} is a number of GPUs, not {ranks!r}", param=name)
    return ranks


def share_gpus(ranks: Sequence[int], gpus: Sequence[int]) -> list[GpuShare]:
    """Return each worker's share: GPUs of its own, or, if there are more workers, those of others in turn.

    `ranks`: GPUs that each worker needs. Raises ConfigurationError if one worker needs more GPUs than there are.
    Unknown GPUs are one that all share.
    """
    if not gpus:
        return [GpuShare(workers=len(ranks))] * len(ranks)
    if max(ranks) > len(gpus):
        raise ConfigurationError(
            f"a worker with {max(ranks)} tensor-parallel ranks needs as many GPUs: here are {len(gpus)}"
        )
    chosen: list[tuple[int, ...]] = []
    first = 0
    for needed in ranks:
        if first + needed > len(gpus):
            first = 0
        chosen.append(tuple(gpus[first : first + needed]))
        first += needed
    sharing = Counter(gpu for group in chosen for gpu in group)
    return [GpuShare(gpus=group, workers=max(sharing[gpu] for gpu in group)) for group in chosen]
