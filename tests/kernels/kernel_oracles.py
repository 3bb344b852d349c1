"""What kernel tests share: the tolerance rule, the batch-invariance rule, and paged rows to attend to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.write_kv import write_kv

needs_native = pytest.mark.skipif(not native.enabled(), reason="no C++ compiler, or SPECDEC_KERNELS=reference")
needs_tiles = pytest.mark.skipif(not native.has_tiles(), reason="no AMX on this machine, or SPECDEC_AMX=0")
BFLOAT16_WAYS = [pytest.param("1", marks=needs_tiles, id="tiles"), pytest.param("0", id="floats")]  # of SPECDEC_AMX
WAYS = [pytest.param(torch.float32, "0", id="float32")] + [
    pytest.param(torch.bfloat16, *way.values, marks=way.marks, id=f"bfloat16 {way.id}") for way in BFLOAT16_WAYS
]


def assert_as_good_as(
    out: Tensor, same_precision: Tensor, oracle: Tensor, slack: float = 2.0, floor: float = 1e-6
) -> None:
    """The kernel may be wrong by at most `slack` times what PyTorch is wrong by in the same dtype."""
    ours = (out.double() - oracle).abs().max().item()
    theirs = (same_precision.double() - oracle).abs().max().item()
    assert ours <= slack * theirs + floor, f"kernel off by {ours:.2e}; PyTorch in this dtype is off by {theirs:.2e}"


def assert_rows_do_not_notice_each_other(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every prefix of the batch, and every row alone, must give the bits of the whole batch."""
    together = op(x)
    for count in range(1, len(x) + 1):
        assert torch.equal(op(x[:count]), together[:count]), f"{count} rows differ from the same rows among {len(x)}"
    for row in range(len(x)):
        assert torch.equal(op(x[row : row + 1])[0], together[row]), f"row {row} alone differs"


@dataclass
class PagedRows:
    """Rows of a paged cache: NaN in every slot that no token owns, block ids shuffled, unused table entries invalid."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        floats = (self.q, self.k_cache, self.v_cache)
        return (*(x.to(dtype or x.dtype) for x in floats), self.block_tables, self.seq_lens, self.cu_query_lens)

    def query_alone(self, row: int, query: int) -> tuple[Tensor, ...]:
        """Return arguments for one query as if it were the only one, and nothing after it had been written."""
        begin, end = self.cu_query_lens[row : row + 2].tolist()
        seq_len = self.seq_lens[row : row + 1] - (end - begin) + query + 1
        at = begin + query
        table = self.block_tables[row : row + 1]
        return self.q[at : at + 1], self.k_cache, self.v_cache, table, seq_len, torch.tensor([0, 1], dtype=torch.int32)


def paged_rows(
    lens: Sequence[tuple[int, int]],  # (seq_len, query_len) of each row
    shape: tuple[int, int, int, int] = (6, 2, 64, 64),  # H, G, D, Dv
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedRows:
    H, G, D, Dv = shape
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-seq_len // block_size) for seq_len, _ in lens]
    free = (torch.randperm(sum(num_blocks) + 2, generator=generator)).tolist()
    tables = torch.full((len(lens), max(num_blocks) + 1), 10**6, dtype=torch.int32)
    slots = []
    for row, (seq_len, _) in enumerate(lens):
        for block in range(num_blocks[row]):
            tables[row, block] = free.pop()
        slots += [int(tables[row, p // block_size]) * block_size + p % block_size for p in range(seq_len)]
    k_cache = torch.full((sum(num_blocks) + 2, block_size, G, D), float("nan"), dtype=dtype)
    v_cache = torch.full((sum(num_blocks) + 2, block_size, G, Dv), float("nan"), dtype=dtype)
    k = torch.randn(len(slots), G, D, generator=generator).to(dtype)
    v = torch.randn(len(slots), G, Dv, generator=generator).to(dtype)
    write_kv(k, v, torch.tensor(slots), k_cache, v_cache)
    query_lens = torch.tensor([0] + [query_len for _, query_len in lens])
    q = torch.randn(int(query_lens.sum()), H, D, generator=generator).to(dtype)
    seq_lens = torch.tensor([seq_len for seq_len, _ in lens], dtype=torch.int32)
    return PagedRows(q, k_cache, v_cache, tables, seq_lens, query_lens.cumsum(0).int())
