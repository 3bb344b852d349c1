"""Captured forwards: a decode or verification step is recorded once for a size, then replayed.

It knows buckets, buffers that never move, and padding; a `Capture` knows how a device records. What is recorded must
read nothing on the host and no tensor but these buffers, weights and caches; a test replays it and looks.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels import dispatch
from specdec.models.forward_batch import ForwardBatch

logger = logging.getLogger("specdec")

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHORTEST_CONTEXT = 1024  # tokens a block table covers in the smallest graph; longer ones grow by four
PAD_SLOT = -1

Result = tuple[Tensor, Tensor | None]
"""Logits [L, V], and features [T, F] where they are captured."""

Compute = Callable[[ForwardBatch], Result]


class Capture(Protocol):
    """How a device records work and repeats it."""

    def record(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Run `work` once and return what repeats it on the same memory; the result's storage is the same each time."""
        ...


def capture_for(device: torch.device) -> Capture | None:
    """How to record on this device; None where nothing is: on a CPU, with SPECDEC_GRAPHS=off, or with twins."""
    if device.type != "cuda" or os.environ.get("SPECDEC_GRAPHS") == "off" or dispatch.mode() == "reference":
        return None
    return CudaCapture(device)


class CudaCapture:
    """CUDA (or HIP) graphs of one runner; they share a memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Warm up on a stream of its own (kernels are compiled, libraries make their workspaces), then capture."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Result:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One graph: the buffers it reads, and what repeats it."""

    buffers: ForwardBatch
    replay: Callable[[], Result]


class GraphedForward:
    """Forwards of at most the largest bucket's tokens are replayed, larger ones computed.

    max_blocks   most entries of a row's block table
    """

    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        *,
        block_size: int,
        max_blocks: int,
        token_buckets: Sequence[int] = TOKEN_BUCKETS,
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._token_buckets = tuple(token_buckets)
        self._table_buckets = _table_buckets(block_size, max_blocks)
        self._graphs: dict[tuple[int, int], _Recorded] = {}
        self._is_refused = False

    @property
    def num_graphs(self) -> int:
        """Graphs recorded so far."""
        return len(self._graphs)

    def forward(self, batch: ForwardBatch) -> Result:
        """Logits and features of a batch; the result is overwritten by the next call."""
        num_tokens, num_blocks = batch.num_tokens, batch.block_tables.shape[1]
        if self._is_refused or num_tokens > self._token_buckets[-1] or num_blocks > self._table_buckets[-1]:
            return self._compute(batch)
        size = self._token_buckets[bisect_left(self._token_buckets, num_tokens)]
        width = self._table_buckets[bisect_left(self._table_buckets, num_blocks)]
        graph = self._graphs.get((size, width)) or self._record(size, width, batch.token_ids.device)
        if graph is None:
            return self._compute(batch)
        _fill(graph.buffers, batch)
        logits, features = graph.replay()
        return logits[: batch.logits_indices.shape[0]], features[:num_tokens].clone() if features is not None else None

    def _record(self, size: int, width: int, device: torch.device) -> _Recorded | None:
        """Record a forward that holds nothing but padding: the graph reads what is filled in later.

        None, and no further attempt, where the model does what cannot be recorded (experts chosen on the host).
        """
        buffers = _empty_batch(size, width, device)
        try:
            replay = self._capture.record(lambda: self._compute(buffers))
        except RuntimeError as error:
            self._is_refused = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            logger.warning("steps are not recorded as graphs, every kernel is launched instead (slower): %s", reason)
            return None
        self._graphs[size, width] = _Recorded(buffers, replay)
        return self._graphs[size, width]


def _table_buckets(block_size: int, max_blocks: int) -> tuple[int, ...]:
    """Widths of block tables, growing by four, the last one for the longest row."""
    widths = [min(-(-SHORTEST_CONTEXT // block_size), max_blocks)]
    while widths[-1] < max_blocks:
        widths.append(min(widths[-1] * 4, max_blocks))
    return tuple(widths)


def _empty_batch(size: int, width: int, device: torch.device) -> ForwardBatch:
    """Buffers for `size` tokens, as many rows and logits rows, all of them padding."""

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=new(torch.int64, size),
        positions=new(torch.int64, size),
        slot_mapping=new(torch.int64, size).fill_(PAD_SLOT),
        block_tables=new(torch.int32, size, width),
        seq_lens=new(torch.int32, size),
        cu_query_lens=new(torch.int32, size + 1),
        logits_indices=new(torch.int64, size),
    )


def _fill(buffers: ForwardBatch, batch: ForwardBatch) -> None:
    """Copy a batch to the front of the buffers; behind it tokens have no slot and rows no tokens."""
    num_tokens, num_rows = batch.num_tokens, batch.seq_lens.shape[0]
    buffers.token_ids[:num_tokens].copy_(batch.token_ids)
    buffers.positions[:num_tokens].copy_(batch.positions)
    buffers.slot_mapping[:num_tokens].copy_(batch.slot_mapping)
    buffers.slot_mapping[num_tokens:].fill_(PAD_SLOT)
    buffers.block_tables[:num_rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
    buffers.seq_lens[:num_rows].copy_(batch.seq_lens)
    buffers.seq_lens[num_rows:].zero_()
    buffers.cu_query_lens[: num_rows + 1].copy_(batch.cu_query_lens)
    buffers.cu_query_lens[num_rows + 1 :].fill_(num_tokens)
    buffers.logits_indices[: batch.logits_indices.shape[0]].copy_(batch.logits_indices)
