"""Two cores of the transfer agent, stepped over a simulated wire: only the decisions are real.

The caller chooses time, the order of deliveries, the progress of each read or write, and every loss.
Blocks hold labels instead of bytes: the label of the KV that belongs there, or GARBAGE once overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton_native import core

Label = tuple[bytes, int, int, int] | str
"""(key, layer, position in the lease, generation), or GARBAGE."""
GARBAGE = "garbage"
LAYERS, BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 2, 64, 4, 100
TERMINAL = {"pull_done", "pull_failed"}
SLOTS = 2
CHUNKS = 14
"""Chunks of a complete pull, one per block: an honest sink has no more in flight, so a higher count means lost ones."""


def crc_of(labels: list[Label]) -> int:
    return hash(tuple(labels)) & 0xFFFFFFFF


@dataclass
class Data:
    """An inline chunk on the wire."""

    pull: int
    sequence: int
    labels: list[Label]


@dataclass
class Writing:
    """A chunk whose blocks are being written one by one."""

    placing: core.Place
    labels: list[Label] | None
    """None if it is read from the source's pool during the write."""
    written: int = 0


@dataclass
class End:
    """One agent's end of a connection."""

    node: Node
    connection: int
    peer: End | None = None
    arriving: deque[bytes | Data] = field(default_factory=deque[bytes | Data])
    reading: deque[core.Serve] = field(default_factory=deque[core.Serve])
    """Chunks to serve; the first may be half read."""
    read: list[Label] = field(default_factory=list[Label])
    payload: Data | None = None
    """An announced chunk that the core has not directed yet, or that is being written."""
    writing: list[Writing] = field(default_factory=list["Writing"])
    """Writes in progress, completed in any order: a later write may end first."""
    slots: dict[int, list[Label]] = field(default_factory=dict[int, list[Label]])
    """Used slots of the ring that this end serves from."""
    backend: str = ""
    hangs: bool = False
    """Drop everything that arrives here, without notice."""

    @property
    def blocked(self) -> bool:
        """Whether frames behind an inline payload wait for it."""
        return self.payload is not None


class Node:
    """One agent: a core, a pool of labels, and the ends of its connections."""

    def __init__(self, world: World, number: int, options: core.Options) -> None:
        self.world = world
        self.number = number
        options.incarnation = number + 1
        options.entropy = bytes([number]) * 32
        options.chunk_bytes = 3 * BLOCK_BYTES
        options.chunks_served = CHUNKS
        self.core = core.Core(options)
        self.core.set_geometry("model", LAYERS, BLOCKS, BLOCK_BYTES, BLOCK_TOKENS)
        self.endpoint = f"node:{number + 1},node:{number + 1}@far~1/{number + 1:016x}"
        self.pool: list[list[Label]] = [[GARBAGE] * BLOCKS for _ in range(LAYERS)]
        self.ends: dict[int, End] = {}
        self.reports: list[core.Report] = []
        self.accepted = 1
        self.writable: dict[int, int] = {}
        """Blocks of this pool that pulls may write, each with the number of those pulls."""

    def step(self, *events: core.Event) -> None:
        """Step the core and carry out its actions."""
        for action in self.core.step(self.world.now_s, list(events)):
            if isinstance(action, core.Report):
                self.world.on_report(self, action)
            else:
                self.carry_out(action)

    def stop_placing(self, end: End, pull: int) -> None:
        if end.payload is not None and end.payload.pull == pull:
            end.payload = None
        stopped = [writing.placing for writing in end.writing if writing.placing.pull == pull]
        end.writing = [writing for writing in end.writing if writing.placing.pull != pull]
        for placing in stopped:
            if placing.slot >= 0:
                placed = core.Placed(end.connection, placing.pull, placing.sequence, placing.slot, 0)
                self.world.queue.append((self, placed))

    def carry_out(self, action: core.Action) -> None:
        assert not isinstance(action, core.Report)
        if isinstance(action, core.Connect):
            self.world.connect(self, action)
            return
        if isinstance(action, core.StopPlacing):
            for end in self.ends.values():
                self.stop_placing(end, action.pull)
            self.world.queue.append((self, core.PlacingStopped(action.pull)))
            return
        end = self.ends.get(action.connection)
        if end is None:
            return
        match action:
            case core.Close():
                self.world.cut(end)
            case core.Send():
                if end.peer is not None:
                    end.peer.arriving.append(bytes(action.frame[4:]))
            case core.Serve():
                end.reading.append(action)
            case core.StopServing():
                begun = 1 if end.read else 0
                kept = [chunk for at, chunk in enumerate(end.reading) if at < begun or chunk.pull != action.pull]
                end.reading = deque(kept)
            case core.Credit():
                del end.slots[action.slot]
            case core.Place():
                assert self.world.may_write(self, action.blocks), "a write after the pull's end was reported"
                if action.where:
                    labels = None
                else:
                    labels = list(end.payload.labels if end.payload else self.world.slot(end, action.slot))
                end.writing.append(Writing(action, labels))
            case core.Discard():
                end.payload = None
            case core.OfferBackend():
                ok = self.world.backend == action.backend
                self.world.queue.append((self, core.BackendOffered(end.connection, ok, b"offer", "not here")))
            case core.AcceptBackend():
                self.world.queue.append((self, core.BackendAccepted(end.connection, True, b"proof")))
            case core.CheckBackend():
                self.world.queue.append((self, core.BackendChecked(end.connection, action.proof == b"proof")))
            case core.UseBackend():
                end.backend = action.backend
            case core.Stage() | core.Convert():
                raise AssertionError("these pools have no layouts")


class World:
    def __init__(self, sources: list[core.Options], *, backend: str) -> None:
        self.now_s = 100.0
        self.backend = backend
        """The backend that works between these nodes: "direct" (or any one-sided one), "shm" or "tcp"."""
        self.queue: deque[tuple[Node, core.Event]] = deque()
        self.nodes = [Node(self, number, options) for number, options in enumerate(sources)]
        self.reachable = True
        self.dest: dict[bytes, list[int]] = {}
        """Destination blocks of each pull that has not ended."""

    # The cores' actions.

    def connect(self, node: Node, action: core.Connect) -> None:
        number = int(action.address.split(":")[1]) - 1
        if not self.reachable:
            self.queue.append((node, core.Closed(action.connection, "unreachable")))
            return
        other = self.nodes[number]
        ours = End(node, action.connection)
        theirs = End(other, other.accepted, peer=ours)
        other.accepted += 2
        ours.peer = theirs
        node.ends[ours.connection] = ours
        other.ends[theirs.connection] = theirs
        self.queue.append((other, core.Accepted(theirs.connection)))
        self.queue.append((node, core.Connected(ours.connection)))

    def cut(self, end: End) -> None:
        """Close a connection for both sides and lose everything in flight."""
        for side in (end, end.peer):
            if side is not None and side.node.ends.pop(side.connection, None) is not None:
                self.queue.append((side.node, core.Closed(side.connection, "cut")))

    def may_write(self, node: Node, blocks: list[int]) -> bool:
        return all(any(block in owned for owned in self.dest.values()) for block in blocks) and node is self.nodes[-1]

    def slot(self, end: End, slot: int) -> list[Label]:
        assert end.peer is not None
        return end.peer.slots[slot]

    def on_report(self, node: Node, report: core.Report) -> None:
        node.reports.append(report)
        if report.kind in TERMINAL:
            blocks = self.dest.pop(report.key)
            assert not any(
                block in writing.placing.blocks
                for end in node.ends.values()
                for writing in end.writing
                for block in blocks
            ), "the end was reported while something still writes"
            if report.kind == "pull_done":
                self.check_content(node, report, blocks)

    def check_content(self, node: Node, report: core.Report, blocks: list[int]) -> None:
        first = -(-report.tokens // BLOCK_TOKENS) - len(blocks)
        generations = {node.pool[layer][block][-1] for layer in range(LAYERS) for block in blocks}
        assert len(generations) == 1, "success with bytes of two generations"
        for layer in range(LAYERS):
            for position, block in enumerate(blocks, first):
                assert node.pool[layer][block] == (report.key, layer, position, *generations), (
                    "success with wrong bytes"
                )

    # Events from outside, one small step at a time.

    def ends(self) -> list[End]:
        return [end for node in self.nodes for end in node.ends.values()]

    def advance_one(self, choice: int) -> bool:
        """Do one of the possible next steps; return whether there was one."""
        moves: list[Callable[[], None]] = [self.take_from_queue] if self.queue else []
        moves += [partial(self.deliver, end) for end in self.ends() if end.arriving and not (end.blocked or end.hangs)]
        moves += [
            partial(self.read_block, end) for end in self.ends() if end.reading and (end.read or self.has_slot(end))
        ]
        moves += [partial(self.write_block, end, writing) for end in self.ends() for writing in end.writing]
        if moves:
            moves[choice % len(moves)]()
        return bool(moves)

    def take_from_queue(self) -> None:
        node, event = self.queue.popleft()
        node.step(event)

    def has_slot(self, end: End) -> bool:
        return end.backend != "shm" or len(end.slots) < SLOTS

    def deliver(self, end: End) -> None:
        message = end.arriving.popleft()
        if isinstance(message, Data):
            end.payload = message
            size = len(message.labels) * BLOCK_BYTES
            end.node.step(core.DataArrived(end.connection, message.pull, message.sequence, size))
        else:
            end.node.step(core.FrameArrived(end.connection, message))

    def read_block(self, end: End) -> None:
        chunk = end.reading[0]
        block = chunk.blocks[len(end.read)]
        end.read.append(end.node.pool[chunk.layer][block])
        if len(end.read) < len(chunk.blocks):
            return
        labels, end.read = end.read, []
        end.reading.popleft()
        crc = crc_of(labels)
        if end.backend == "direct":
            crc ^= chunk.corrupt
            where = bytes(chunk.blocks)
            end.node.step(core.Granted(end.connection, chunk.pull, chunk.sequence, crc, where))
            return
        if chunk.corrupt:
            labels = [GARBAGE, *labels[1:]]
        slot = -1
        if end.backend == "tcp":
            if end.peer is not None:
                end.peer.arriving.append(Data(chunk.pull, chunk.sequence, labels))
        else:
            slot = next(number for number in range(SLOTS) if number not in end.slots)
            end.slots[slot] = labels
        end.node.step(core.Served(end.connection, chunk.pull, chunk.sequence, slot, crc))

    def write_block(self, end: End, writing: Writing) -> None:
        placing = writing.placing
        block = placing.blocks[writing.written]
        assert self.may_write(end.node, [block]), "a write after the pull's end was reported"
        end.node.pool[placing.layer][block] = self.label(end, writing)
        writing.written += 1
        if writing.written < len(placing.blocks):
            return
        end.writing.remove(writing)
        crc = crc_of([end.node.pool[placing.layer][block] for block in placing.blocks])
        if writing.labels is not None and placing.slot < 0:
            end.payload = None
        end.node.step(core.Placed(end.connection, placing.pull, placing.sequence, placing.slot, crc))

    def label(self, end: End, writing: Writing) -> Label:
        if writing.labels is not None:
            return writing.labels[writing.written]
        assert end.peer is not None
        return end.peer.node.pool[writing.placing.layer][writing.placing.where[writing.written]]

    def tick(self, duration_s: float) -> None:
        self.now_s += duration_s
        for node in self.nodes:
            node.step()
