"""What the hot kernels should cost at best: bytes and operations of every op, on four cards, from shapes alone.

It knows cards (their makers' data sheets), shapes of three models and how the kernels cut their work. It measures
nothing: floors are lower bounds, the predicted share is a model, and both are there to be compared with `--run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from specdec.kernels.paged_attention import tiles

_NOISE_INSTRUCTIONS = 116  # per id drawn with noise: the sm_90 binary has 1856 for the 16 ids of a thread
_TILE_IDS = 4096  # ids a program of `accept` owns
_CHUNK = 2048  # tokens of a prompt chunk
_LAUNCH = 2e-6  # seconds a kernel takes inside a graph even if it has nothing to do
_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Card:
    """A data sheet.

    bandwidth      bytes a second
    matrix_flops   a second, bf16 with fp32 sums, dense
    instructions   a second, 32-bit, one a lane
    processors     streaming multiprocessors or compute units
    memory         bytes
    """

    name: str
    bandwidth: float
    matrix_flops: float
    instructions: float
    processors: int
    memory: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: layers, query heads, KV heads, head width, vocabulary, longest context and parameters."""

    name: str
    layers: int
    H: int
    G: int
    D: int
    V: int
    longest: int
    parameters: float

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer, bf16."""
        return self.G * self.D * 2 * 2


CARDS = {
    card.name: card
    for card in (
        Card("A100", 2.039e12, 312e12, 9.75e12, 108, 80e9),
        Card("H100", 3.35e12, 989e12, 33.5e12, 132, 80e9),
        Card("H200", 4.8e12, 989e12, 33.5e12, 132, 141e9),
        Card("MI300X", 5.3e12, 1307e12, 40.8e12, 304, 192e9),
    )
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Llama-3.1-8B", 32, 32, 8, 128, 128256, 131072, 8.03e9),
        Shape("Qwen3-32B", 64, 64, 8, 128, 151936, 40960, 32.8e9),
        Shape("SmolLM2-135M", 30, 9, 3, 64, 49152, 8192, 134.5e6),
    )
}


@dataclass(frozen=True, slots=True)
class Grid:
    """What is asked for; ValueError names a card or shape that is not known."""

    cards: Sequence[str]
    shapes: Sequence[str]
    batches: Sequence[int]
    contexts: Sequence[int]
    drafts: Sequence[int]

    def __post_init__(self) -> None:
        for kind, names, known in (("card", self.cards, CARDS), ("shape", self.shapes, SHAPES)):
            for name in names:
                if name not in known:
                    raise ValueError(f"{kind} is {name!r}; known are {', '.join(known)}")
        if min([*self.batches, *self.contexts], default=0) < 1 or min(self.drafts, default=-1) < 0:
            raise ValueError("batches and contexts must be at least 1, drafts at least 0, and none may be empty")


@dataclass(frozen=True, slots=True)
class Case:
    """One call: B rows of a context, K drafts each."""

    shape: Shape
    batch: int
    context: int
    drafts: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call.

    bytes          moved to or from memory at least
    flops          multiplications and additions in matrix units
    instructions   elsewhere, where they count
    programs       pieces of work of the largest launch
    launches       kernels
    """

    bytes: float
    flops: float
    instructions: float
    programs: int
    launches: int

    def floor(self, card: Card) -> float:
        """Seconds no kernel can beat on this card."""
        return max(self.bytes / card.bandwidth, self.flops / card.matrix_flops, self.instructions / card.instructions)

    def waves(self, card: Card) -> float:
        """How often the card is filled with programs."""
        return self.programs / (card.processors * _PROGRAMS_PER_PROCESSOR)

    def predicted(self, card: Card) -> float:
        """Seconds with the last wave's idle processors, or too few programs to reach all of them, and launches."""
        waves = self.waves(card)
        filled = waves / ceil(waves) if waves >= 1 else min(1.0, self.programs / card.processors)
        return self.floor(card) / filled + self.launches * _LAUNCH


def _verify_attention(case: Case) -> Cost:
    """Keys and values once, whatever K; queries, outputs, and the partial sums written and read."""
    shape, queries = case.shape, case.batch * (case.drafts + 1)
    splits = ceil(case.context / tiles.SPLIT)
    tile = tiles.verify_tile(tiles.HeadShape(shape.H // shape.G, shape.D, shape.D, 2))
    tiles_of_row = ceil((case.drafts + 1) * (shape.H // shape.G) / tile.block_m)
    parts = 2 * queries * shape.H * splits * (shape.D + 2) * 4
    passed = tiles_of_row * tile.block_m * shape.G  # pairs of query and head that matrix units see, padding included
    return Cost(
        bytes=case.batch * case.context * shape.kv_bytes + queries * shape.H * shape.D * 2 * 2 + parts,
        flops=4.0 * case.batch * passed * case.context * shape.D,
        instructions=0,
        programs=case.batch * shape.G * splits * tiles_of_row,
        launches=2,
    )


def _prefill_attention(case: Case) -> Cost:
    """A chunk of one row at the end of its context."""
    shape = case.shape
    chunk = min(_CHUNK, case.context)
    tile = tiles.prefill_tile(tiles.HeadShape(shape.H // shape.G, shape.D, shape.D, 2))
    seen = case.context - chunk / 2
    return Cost(
        bytes=case.context * shape.kv_bytes + chunk * shape.H * shape.D * 2 * 2,
        flops=4.0 * chunk * shape.H * seen * shape.D,
        instructions=0,
        programs=ceil(chunk * (shape.H // shape.G) / tile.block_m) * shape.G,
        launches=1,
    )


def _write_kv(case: Case) -> Cost:
    tokens = case.batch * (case.drafts + 1)
    return Cost(tokens * (2 * case.shape.kv_bytes + 8), 0, 0, tokens, 1)


def _accept(case: Case) -> Cost:
    """bf16 scores read once, all rows with noise."""
    rows = case.batch * (case.drafts + 1)
    return Cost(
        bytes=rows * case.shape.V * 2.0,
        flops=0,
        instructions=rows * case.shape.V * float(_NOISE_INSTRUCTIONS),
        programs=rows * ceil(case.shape.V / _TILE_IDS),
        launches=2,
    )


OPS: dict[str, Callable[[Case], Cost]] = {
    "verify_attention": _verify_attention,
    "prefill_attention": _prefill_attention,
    "write_kv": _write_kv,
    "accept": _accept,
}
_DEPENDS_ON = {"prefill_attention": ("context",), "write_kv": ("batch", "drafts"), "accept": ("batch", "drafts")}

HEADERS = [
    "op", "card", "shape", "batch", "context", "K", "MB", "GFLOP", "limit", "floor us", "waves", "share %",
]  # fmt: skip
NOTES = """\
One call, which is one layer of attention and write_kv, and one step of accept. MB: moved at least; bf16 cache and
scores. GFLOP: in matrix units, padding of tiles included. limit: what sets the floor; instructions are the noise of
every id of every row, which greedy rows do not draw. waves: programs over four a processor. share: floor over the time
predicted from idle processors and 2 us a launch inside a graph. A model, not a measurement: it knows nothing of
latencies, so a share near 100 is a bound. Rows that do not fit the card beside the weights in bf16 are left out."""


@dataclass(frozen=True, slots=True)
class RoofRow:
    """One row of the table."""

    op: str
    card: Card
    case: Case
    cost: Cost

    def limit(self) -> str:
        """What sets the floor."""
        cost, card = self.cost, self.card
        times = {
            "memory": cost.bytes / card.bandwidth,
            "matrix": cost.flops / card.matrix_flops,
            "instructions": cost.instructions / card.instructions,
        }
        return max(times, key=lambda name: times[name])

    def cells(self) -> list[str]:
        """For the table; what an op does not depend on is left blank."""
        cost, case = self.cost, self.case
        seen = _DEPENDS_ON.get(self.op, ("batch", "context", "drafts"))
        where = [str(getattr(case, name)) if name in seen else "" for name in ("batch", "context", "drafts")]
        floor = cost.floor(self.card)
        share = 100 * floor / cost.predicted(self.card)
        return [
            self.op, self.card.name, case.shape.name, *where, f"{cost.bytes / 1e6:.3g}", f"{cost.flops / 1e9:.3g}",
            self.limit(), f"{floor * 1e6:.3g}", f"{cost.waves(self.card):.3g}", f"{share:.0f}",
        ]  # fmt: skip


def fits(card: Card, case: Case) -> bool:
    """Whether weights and the cache of all layers stay within nine tenths of the card."""
    cache = case.batch * case.context * case.shape.kv_bytes * case.shape.layers
    return case.shape.parameters * 2 + cache <= 0.9 * card.memory and case.context <= case.shape.longest


def cases(op: str, grid: Grid) -> Iterator[Case]:
    """Of one op, without those that differ only in what it does not depend on."""
    seen = _DEPENDS_ON.get(op, ("batch", "context", "drafts"))
    for name in grid.shapes:
        for batch in grid.batches if "batch" in seen else [1]:
            for context in grid.contexts if "context" in seen else [1]:
                for drafts in grid.drafts if "drafts" in seen else [0]:
                    yield Case(SHAPES[name], batch, context, drafts)


def rows(ops: Sequence[str], grid: Grid) -> Iterator[RoofRow]:
    """The table; ValueError names an op that is not known."""
    for op in ops:
        if op not in OPS:
            raise ValueError(f"op is {op!r}; known are {', '.join(OPS)}")
        for card in (CARDS[name] for name in grid.cards):
            for case in cases(op, grid):
                if fits(card, case):
                    yield RoofRow(op, card, case, OPS[op](case))
