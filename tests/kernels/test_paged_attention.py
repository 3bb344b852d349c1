"""Paged attention: right at block edges, blind to what it must not see, the same bits for a query in any company."""

import contextlib
from typing import Any

import pytest
import torch
from kernel_oracles import WAYS, PagedRows, assert_as_good_as, needs_native, needs_tiles, paged_rows
from torch.nn import functional as F

from specdec.kernels import native
from specdec.kernels.paged_attention import paged_attention

SHAPES = [(9, 3, 64, 64), (4, 2, 32, 32), (5, 1, 80, 40), (2, 2, 17, 9), (70, 1, 16, 16)]  # H, G, D, Dv
TILED_SHAPES = [(9, 3, 64, 64), (7, 1, 128, 64), (2, 2, 64, 192)]
WAYS_AND_SHAPES = [
    pytest.param(*way.values, shape, marks=way.marks, id=f"{way.id} {shape}")
    for way in WAYS
    for shape in (SHAPES if way.values[1] == "0" else TILED_SHAPES)
]
SINKS = torch.linspace(-2, 2, 70)
OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"window": 100}, {"softcap": 5.0}, {"sinks": True}]


def options_for(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": SINKS[:heads]} if "sinks" in options else options


def implementation(is_native: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if is_native else native.disabled()


def edge_lens(block_size: int) -> list[tuple[int, int]]:
    at_edges = [(n, min(n, 3)) for n in (1, block_size - 1, block_size, block_size + 1) if n > 0]
    return [*at_edges, (300, 5), (600, 1), (130, 70), (64, 64), (257, 2)]


def dense_oracle(rows: PagedRows, scale: float) -> torch.Tensor:
    """Float64 attention by scaled_dot_product_attention over keys gathered one by one: shares no code with the twin."""
    outs = []
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        begin, end = rows.cu_query_lens[row : row + 2].tolist()
        size = rows.k_cache.shape[1]
        pairs = [(int(rows.block_tables[row, p // size]), p % size) for p in range(seq_len)]
        k = torch.stack([rows.k_cache[b, o] for b, o in pairs], 1).double()
        v = torch.stack([rows.v_cache[b, o] for b, o in pairs], 1).double()
        mask = torch.ones(end - begin, seq_len, dtype=torch.bool).tril(seq_len - (end - begin))
        q = rows.q[begin:end].transpose(0, 1).double()
        repeat = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_twin_agrees_with_dense_attention(block_size: int) -> None:
    rows = paged_rows(edge_lens(block_size), block_size=block_size)
    out = paged_attention(*rows.arguments(torch.float64), scale=0.2)
    assert torch.allclose(out, dense_oracle(rows, 0.2), atol=1e-12)


def test_a_wrong_mask_is_caught() -> None:
    """Negative control: one key too few, as a window of the context less one, must show against the dense oracle."""
    rows = paged_rows([(40, 1)])
    assert not torch.allclose(
        paged_attention(*rows.arguments(torch.float64), scale=0.2, window=39), dense_oracle(rows, 0.2), atol=1e-3
    )


@needs_native
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "amx", "shape"), WAYS_AND_SHAPES)
def test_native_is_as_good_as_the_twin(
    dtype: torch.dtype, amx: str, shape: tuple[int, int, int, int], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    options = options_for(options, shape[0])
    for block_size in (1, 24):
        rows = paged_rows(edge_lens(block_size), shape, block_size, dtype)
        oracle = paged_attention(*rows.arguments(torch.float64), scale=shape[2] ** -0.5, **options)
        with native.disabled():
            twin = paged_attention(*rows.arguments(), scale=shape[2] ** -0.5, **options)
        assert_as_good_as(paged_attention(*rows.arguments(), scale=shape[2] ** -0.5, **options), twin, oracle)


@needs_tiles
@pytest.mark.parametrize("shape", TILED_SHAPES, ids=str)
def test_tiles_keep_sixteen_bits_of_queries_and_weights(shape: tuple[int, int, int, int]) -> None:
    """Scores are off by 2**-16 of their terms, so weights by that times the largest of those, and results likewise."""
    rows = paged_rows(edge_lens(16), shape, 16, torch.bfloat16)
    q = torch.randn(rows.q.shape, generator=torch.Generator().manual_seed(2))
    others = rows.arguments()[1:]
    found = paged_attention(q, *others, scale=shape[2] ** -0.5)
    assert found.dtype == torch.float32
    wide = (q.double(), others[0].double(), others[1].double(), *others[2:])
    oracle = paged_attention(*wide, scale=shape[2] ** -0.5)
    assert (found - oracle).abs().max() < 2**-12
    blunt = paged_attention(q.bfloat16().double(), *wide[1:], scale=shape[2] ** -0.5)
    assert (blunt - oracle).abs().max() > 2**-9, "the check can tell whole queries from rounded ones"


@needs_native
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "amx"), WAYS)
def test_a_query_has_the_same_bits_in_any_company_on_any_threads(
    dtype: torch.dtype, amx: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    options = options_for(options, 9)
    lens = [*edge_lens(16), (1300, 2), (700, 40)]
    rows = paged_rows(lens, (9, 3, 64, 64), 16, dtype)
    together = paged_attention(*rows.arguments(), scale=0.125, **options)
    before = torch.get_num_threads()
    for row, (_, query_len) in enumerate(lens):
        for query in {0, query_len // 2, query_len - 1}:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                alone = paged_attention(*rows.query_alone(row, query), scale=0.125, **options)
                torch.set_num_threads(before)
                at = int(rows.cu_query_lens[row]) + query
                assert torch.equal(alone[0], together[at]), f"row {row}, query {query}, {threads} threads"


@pytest.mark.parametrize("is_native", [True, False])
def test_blocks_that_slid_out_of_the_window_are_not_read(is_native: bool) -> None:
    rows = paged_rows([(100, 2)], block_size=16)
    out = paged_attention(*rows.arguments(), scale=0.125, window=10)
    rows.block_tables[0, :5] = -(10**6)  # positions 0..79; the two queries see 89..99
    with implementation(is_native):
        again = paged_attention(*rows.arguments(), scale=0.125, window=10)
    assert torch.allclose(out, again, atol=1e-6)


@pytest.mark.parametrize("is_native", [True, False])
def test_padding_beyond_the_last_query_is_zero_and_empty_rows_are_skipped(is_native: bool) -> None:
    rows = paged_rows([(20, 2), (5, 1)])
    rows.cu_query_lens = torch.tensor([0, 2, 2], dtype=torch.int32)
    with implementation(is_native):
        out = paged_attention(*rows.arguments(), scale=0.125)
    assert not out[2:].any() and out[:2].isfinite().all()


def test_a_row_with_nan_fails_alone() -> None:
    rows = paged_rows([(20, 2), (40, 3)])
    first_block = int(rows.block_tables[0, 0])
    rows.k_cache[first_block, 3] = float("nan")
    out = paged_attention(*rows.arguments(), scale=0.125)
    assert out[:2].isnan().any() and out[2:].isfinite().all()
