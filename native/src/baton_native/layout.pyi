"""KV layouts: what cannot be converted into what, who is asked for which heads, and the conversions.

Sizes are in elements and tokens unless their name says bytes; heads are `(first, count)` of the whole
model's. Everything that copies lets go of the GIL, checks all its arguments before the first byte, and
writes nothing outside the tokens and heads it was asked for.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from typing_extensions import Buffer

Plane: TypeAlias = Literal["k", "v", "latent"]

class Invalid(ValueError):
    """A descriptor, range, pool or buffer makes no sense by itself."""

class Mismatch(ValueError):
    """Two layouts cannot be converted into each other; the text names both in full."""

class Layout:
    """What one tensor-parallel rank's paged KV cache holds, without addresses. Immutable and hashable.

    A block of one layer is, by `form`, `order` and `packing` (T tokens of a block, H heads of this rank, D = `dim`):

    - split, NHD or HND: two tensors, K and V, each [T][H][D] or [H][T][D]
    - fused, NHD or HND: one tensor, [T][H][K's D, V's D] or [H][T][K's D, V's D]
    - fused, HND, vec: one tensor, [H][K: [D][T], V: [T][D]]
    - fused, HND, amx: one tensor, [H][K: [T/16][D/2][16][2], V: [D/16][T/2][16][2]]
    - latent: one tensor, [T][D]; `kv_heads` is 1 and every rank holds all of it
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        dim: int,
        dtype: str,
        order: str,
        form: str,
        block_tokens: int,
        packing: str = "plain",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        """Raises Invalid. `kv_heads`: of the whole model, a multiple or a divisor of `tp_size`."""

    @staticmethod
    def parse(text: str) -> Layout:
        """Return the layout whose `str` is `text`; raises Invalid for anything else."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str:
        """float32, bfloat16, float16, float8_e4m3 or float8_e5m2."""

    @property
    def order(self) -> str:
        """NHD or HND."""

    @property
    def form(self) -> str:
        """split, fused or latent."""

    @property
    def packing(self) -> str:
        """plain, vec or amx."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int]:
        """The heads that this rank holds."""

    @property
    def tensors(self) -> int:
        """Tensors per layer: 2 where K and V are split, else 1."""

    @property
    def block_bytes(self) -> int:
        """Of one block of one tensor of one layer."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class Pool:
    """A rank's cache in this process. It keeps addresses, not memory: the memory must outlive it."""

    def __init__(self, layout: Layout, addresses: Sequence[int], blocks: int, stride_bytes: int) -> None:
        """Block b of a tensor lies at its address + b * `stride_bytes`.

        `addresses`: one per tensor, by layer; where K and V are split, a layer's K and then its V. Raises Invalid.
        """

    @property
    def layout(self) -> Layout: ...
    @property
    def blocks(self) -> int: ...

class Table:
    """Where a sequence's tokens lie on one side: `blocks[0]` holds those from position `origin` on."""

    def __init__(self, blocks: Sequence[int], origin: int = 0) -> None: ...
    @property
    def blocks(self) -> list[int]: ...
    @property
    def origin(self) -> int: ...

class Move:
    """Tokens that go from one place to another in order; where a block ends, the next by number follows."""

    @property
    def source_block(self) -> int: ...
    @property
    def source_token(self) -> int:
        """Within the block, as `sink_token` is."""

    @property
    def sink_block(self) -> int: ...
    @property
    def sink_token(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def whole(self) -> bool:
        """Whole blocks that are equal on both sides: their bytes are copied as they are."""

class Share:
    """What a sink's rank asks of one of the source's ranks."""

    @property
    def source_rank(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int]: ...

class Chunk:
    """A piece of one layer in wire form: one plane, dense, `[head][token][dim]`."""

    def __init__(self, *, layer: int, plane: Plane, first_token: int, tokens: int, heads: tuple[int, int]) -> None: ...
    @property
    def layer(self) -> int: ...
    @property
    def plane(self) -> Plane: ...
    @property
    def first_token(self) -> int:
        """Position in the sequence."""

    @property
    def tokens(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int]: ...

def identical(source: Layout, sink: Layout) -> bool:
    """Whether blocks of these two ranks can be moved whole. Raises Mismatch."""

def shares(source: Layout, sink: Layout) -> list[Share]:
    """Return which of the source's ranks give `sink` its heads, each head once. Raises Mismatch.

    `source` may be any rank's. Where several ranks hold the same heads, sinks are spread over them.
    """

def common_heads(source: Layout, sink: Layout) -> tuple[int, int]:
    """Return the heads that both ranks hold; raises Mismatch where there are none."""

def plan(
    source: Layout, source_table: Table, sink: Layout, sink_table: Table, first_token: int, tokens: int
) -> list[Move]:
    """Return how tokens [first_token, first_token + tokens) go from one side's blocks to the other's, in few moves.

    Raises Mismatch, and Invalid for a range that a table does not cover.
    """

def chunks(
    layout: Layout, layer: int, first_token: int, tokens: int, heads: tuple[int, int], bytes_max: int
) -> list[Chunk]:
    """Return a layer's tokens and heads cut into chunks of at most `bytes_max`, in order of tokens.

    Where a chunk can hold a block of `layout` (the sink's), chunks end where blocks do. Raises Invalid.
    """

def chunk_bytes(layout: Layout, chunk: Chunk) -> int:
    """Return a chunk's size in wire form; raises Invalid where this rank has no such piece."""

def convert(
    source: Pool,
    source_table: Table,
    sink: Pool,
    sink_table: Table,
    first_token: int,
    tokens: int,
    first_layer: int,
    layers: int,
) -> int:
    """Copy tokens of some layers between pools that do not overlap, all heads that both hold; return the bytes.

    Raises Mismatch, and Invalid for layers, ranges or blocks that are not there.
    """

def convert_tensor(
    source: Pool,
    source_table: Table,
    sink: Pool,
    sink_table: Table,
    first_token: int,
    tokens: int,
    tensor: int,
) -> int:
    """Do the same for one tensor of the source, counted as in its pool: where K and V are split, one of a layer's two.

    The source's other tensors are not read.
    """

def gather(pool: Pool, table: Table, chunk: Chunk, out: Buffer) -> None:
    """Write a chunk in wire form to `out`, which is writable and has exactly `chunk_bytes`. Raises Invalid."""

def scatter(pool: Pool, table: Table, chunk: Chunk, data: Buffer) -> None:
    """Store a chunk that came in wire form; `data` has exactly `chunk_bytes`. Raises Invalid."""

class DeviceMover:
    """A CUDA GPU that carries conversions out between pools in its memory; see `convert`, `gather` and `scatter`.

    Each call waits for its end and returns the seconds that it took the GPU. Rows must be whole, aligned 16 bytes;
    packed layouts are a CPU's and raise Invalid. Raises baton_native.GpuError where the GPU fails or takes longer than
    `budget_s`: then drop the mover before the memory.
    """

    def __init__(self, library: str = "", device: int = 0, budget_s: float = 10.0) -> None:
        """Raise baton_native.GpuUnavailable where there is none. `library`: empty for this build's own."""
    def convert(
        self,
        source: Pool,
        source_table: Table,
        sink: Pool,
        sink_table: Table,
        first_token: int,
        tokens: int,
        first_layer: int,
        layers: int,
    ) -> float: ...
    def gather(self, pool: Pool, table: Table, chunk: Chunk, address: int) -> float:
        """Write a chunk in wire form to the GPU's memory at `address`."""
    def scatter(self, pool: Pool, table: Table, chunk: Chunk, address: int) -> float: ...
