"""What 10,000 random operations leave of the pool's and the engine's room, and how many moves a request costs then."""

from __future__ import annotations

from random import Random

import pytest

from baton.pool.directory import PoolDirectory
from baton.pool.memory import PAGE_BYTES, slot_bytes
from baton.pool.policy import PolicyName, make_policy
from tests.unit.test_pool_scheduler import BLOCKS, ToyEngine

SLOTS, OPERATIONS = 256, 10_000
PROMPTS, BLOCKS_MAX = 40, 48


def chain_of(prompt: int, blocks: int) -> list[bytes]:
    return [b"%d/%d" % (prompt, index) for index in range(blocks)]


@pytest.mark.parametrize("policy", PolicyName)
def test_any_free_slot_serves_any_block(policy: PolicyName) -> None:
    """Slots are equal, so nothing that is free is too small: all that is neither pinned nor filling can be had at once.

    One block is one slot, hence one move per layer, in whatever order slots were given back.
    """
    random, directory = Random(1), PoolDirectory(SLOTS, make_policy(policy, SLOTS))
    pins: list[list[bytes]] = []
    filling: list[list[bytes]] = []
    for number in range(OPERATIONS):
        chain = chain_of(random.randrange(PROMPTS), random.randint(1, BLOCKS_MAX))
        match random.randrange(4):
            case 0 if (blocks := directory.match(chain)) and len(pins) < 3:
                directory.pin(chain, 0, blocks)
                pins.append(chain[:blocks])
            case 1 if pins:
                directory.unpin(pins.pop(random.randrange(len(pins))))
            case 2 if filling:
                keys = filling.pop(random.randrange(len(filling)))
                (directory.abandon if random.random() < 0.1 else directory.filled)(keys)
            case _ if len(filling) < 3:
                keys = [chain[index] for index, _ in directory.reserve(chain, 0)]
                filling += [keys] if keys else []
            case _:
                pass
        if number % 500 == 499:
            room = SLOTS - directory.pinned - directory.filling
            fresh = [b"fresh %d/%d" % (number, index) for index in range(room + 1)]
            reserved = directory.reserve(fresh, 0)
            assert len(reserved) == len({slot for _, slot in reserved}) == room
            directory.abandon([fresh[index] for index, _ in reserved])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_engines_blocks_are_all_free_after_random_requests() -> None:
    engine = ToyEngine(Random(2))
    engine.run(OPERATIONS)
    while engine.running or engine.scheduler.is_busy:
        for name in [name for name, request in engine.running.items() if not request.waits]:
            engine.finish(name)
        engine.step(())
    assert engine.users == [0] * BLOCKS


@pytest.mark.parametrize(("tensors", "block_bytes"), [(4, 32 * 1024), (61, 73_728), (3, 256), (1, 4097)])
def test_a_slot_wastes_less_than_a_page(tensors: int, block_bytes: int) -> None:
    assert 0 <= slot_bytes(tensors, block_bytes) - tensors * block_bytes < PAGE_BYTES
