"""Attention inside the native forward, beside the least time it takes to read its keys and values once.

It makes up steps over a filled cache and reads the forward's own clock; every layer has a cache of its own and the
weights between them pass through the processor's caches too, as when the model serves. It knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec import LLM
from specdec.kernels.llama_forward import STAGES, LlamaStep, PackedLlama, llama_forward
from specdec.kv_cache import KVCache

HEADERS = ("rows", "keys", "queries", "attention ms", "read ms", "attention / read")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Milliseconds of one step: medians of the attention of all layers, and the least time to read what it reads."""

    rows: int
    keys: int  # a row's, its queries' own included
    queries: int
    attention: float
    read: float

    def row(self) -> list[str]:
        """One line of the table."""
        numbers = (str(self.rows), str(self.keys), str(self.queries))
        return [*numbers, f"{self.attention:.2f}", f"{self.read:.2f}", f"{self.attention / self.read:.2f}"]


def measure_attention(
    made: LLM, bytes_per_second: float, rows: Sequence[int], keys: Sequence[int], queries: Sequence[int], times: int
) -> list[AttentionCase]:
    """Every combination; `made` has blocks for the most rows of the most keys."""
    runner = made.engine.target
    fast, cache = runner.model.fast, runner.cache
    if fast is None:
        raise SystemExit("--attention reads the clock of the native forward, and this model does not run in it")
    _fill(cache)
    cases = []
    for r in rows:
        for n in keys:
            for q in queries:
                seconds = _attention_seconds(fast, cache, _step(cache, r, n, q), times)
                num_bytes = r * n * sum(x[0, 0].nbytes for x in (*cache.keys, *cache.values))
                read = 1e3 * num_bytes / bytes_per_second
                cases.append(AttentionCase(rows=r, keys=n, queries=q, attention=1e3 * seconds, read=read))
    return cases


def _fill(cache: KVCache) -> None:
    """Write every block: memory that was never written is one page of zeros, which the processor would hold."""
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape[1:]).to(tensor.dtype).expand_as(tensor))


def _step(cache: KVCache, rows: int, keys: int, queries: int) -> LlamaStep:
    """Every row's last `queries` of `keys` tokens, in blocks scattered over the pool."""
    blocks = -(-keys // cache.block_size)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order[: rows * blocks].view(rows, blocks).to(torch.int32)
    positions = torch.arange(keys - queries, keys)
    slots = tables.long()[:, positions // cache.block_size] * cache.block_size + positions % cache.block_size
    return LlamaStep(
        token_ids=torch.arange(rows * queries),
        positions=positions.repeat(rows),
        slot_mapping=slots.flatten(),
        block_tables=tables,
        seq_lens=torch.full((rows,), keys, dtype=torch.int32),
        cu_query_lens=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32),
        logits_indices=torch.arange(1),
    )


def _attention_seconds(fast: PackedLlama, cache: KVCache, step: LlamaStep, times: int) -> float:
    caches = list(zip(cache.keys, cache.values, strict=True))
    seen = []
    for _ in range(times + 1):
        seconds = torch.zeros(len(STAGES), dtype=torch.float64)
        llama_forward(fast, step, caches, seconds)
        seen.append(seconds[STAGES.index("attention")])
    return float(torch.stack(seen[1:]).median())
