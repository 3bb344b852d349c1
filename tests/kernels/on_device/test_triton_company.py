"""Decode and verify rows in ragged company: a query keeps its bits, whatever rows, orders and drafts are beside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.accept import reference, reject
from specdec.kernels.paged_attention import StepLists, launch, paged_attention, work_list
from specdec.kernels.write_kv import write_kv
from tests.kernels.kernel_oracles import PagedRows, assert_as_good_as, paged_rows
from tests.kernels.on_device.test_triton_attention import FP8, moved, quantised, twin

MOST = 9  # query tokens: K = 0..8
SHORT_SPLIT = 64
ENDS = (9, 63, 64, 65, 72, 130, 199, 257)  # contexts: inside, at and behind the ends of splits and blocks
CASES: list[tuple[tuple[int, int, int, int], int, dict[str, Any], torch.dtype, bool]] = [
    ((7, 1, 48, 24), 8, {"window": 33}, torch.bfloat16, True),
    ((16, 1, 32, 32), 24, {"softcap": 3.0}, torch.float16, False),  # more pairs than a tile holds
    ((71, 1, 16, 16), 256, {"sinks": True, "window": 90}, torch.bfloat16, False),
    ((4, 4, 80, 96), 3, {}, torch.float32, True),
    ((6, 2, 192, 128), 16, {"sinks": True, "softcap": 20.0}, torch.bfloat16, False),
    ((2, 1, 256, 256), 64, {"window": 1}, torch.float16, True),
    ((3, 3, 17, 33), 128, {"window": 64, "softcap": 5.0, "sinks": True}, torch.float64, False),
]


def attend(arguments: tuple[Tensor, ...], how: dict[str, Any]) -> Tensor:
    return paged_attention(*arguments, scale=0.2, **how)


def ragged(rows: PagedRows, order: list[int], query_lens: list[int]) -> tuple[Tensor, ...]:
    """Some rows in some order, each with its first `query_len` queries, as if the later ones had not been drafted.

    Tables are a view with a stride of its own; behind the last query two tokens of padding hold NaN.
    """
    q = rows.q.view(-1, MOST, *rows.q.shape[1:])
    taken = torch.cat([q[row, :n] for row, n in zip(order, query_lens, strict=True)])
    taken = torch.cat([taken, torch.full_like(taken[:1], float("nan")).expand(2, -1, -1)])
    device = q.device
    lens = torch.tensor([int(rows.seq_lens[row]) - MOST + n for row, n in zip(order, query_lens, strict=True)])
    bounds = torch.tensor([0, *query_lens]).cumsum(0)
    tables = torch.cat([rows.block_tables[order], rows.block_tables[order] * 0 - 7], 1)[:, : rows.block_tables.shape[1]]
    return taken, rows.k_cache, rows.v_cache, tables, lens.int().to(device), bounds.int().to(device)


def stored(
    shape: tuple[int, int, int, int], block_size: int, options: dict[str, Any], dtype: torch.dtype, is_fp8: bool
) -> tuple[PagedRows, dict[str, Any]]:
    rows = paged_rows([(n, MOST) for n in ENDS], shape, block_size, dtype)
    how = {**options, "sinks": torch.linspace(-2, 2, shape[0])} if "sinks" in options else dict(options)
    if is_fp8:
        how["k_scales"], how["v_scales"] = torch.rand(2, shape[1]) / 16 + 0.01
        rows = quantised(rows, how["k_scales"], how["v_scales"])
    return rows, how


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "block_size", "options", "dtype", "is_fp8"), CASES, ids=str)
def test_every_query_keeps_its_bits_in_ragged_company(
    shape: tuple[int, int, int, int],
    block_size: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    is_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """K = 0..8 and batches of 1..8 in one call, rows shuffled; the values are right too."""
    monkeypatch.setattr(launch, "SPLIT", SHORT_SPLIT)
    rows, how = stored(shape, block_size, options, dtype, is_fp8)
    rows, how = moved(rows, device), {k: v.to(device) if isinstance(v, Tensor) else v for k, v in how.items()}
    whole = ragged(rows, list(range(8)), [MOST] * 8)
    full = attend(whole, how)
    assert not full[-2:].any()
    named = {k: v for k, v in how.items() if k.endswith("scales")}
    wide = (whole[0].double(), *(x if is_fp8 else x.double() for x in whole[1:3]), *whole[3:])
    exact = [twin((x[0][:-2], *x[1:]), 0.2, how, **named) for x in (whole, wide)]
    assert_as_good_as(full[:-2], *exact, slack=2.5, floor=2e-6)
    full = full[:-2].view(8, MOST, shape[0], shape[3])
    chance = random.Random(str(shape))
    for num_rows in (1, 2, 3, 5, 8, 8):
        order = chance.sample(range(8), num_rows)
        query_lens = [chance.randint(1, MOST) for _ in order]
        out = attend(ragged(rows, order, query_lens), how)
        for row, part in zip(order, out[:-2].split(query_lens), strict=True):
            assert torch.equal(part, full[row, : len(part)]), f"row {row} of {order} with {query_lens} queries"


def test_work_lists_of_more_rows_than_a_pass_counts(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Rows, tiles and tokens beyond one CHUNK: what later rows own begins where the earlier ones end."""
    lens = [(40, 1), (70, 9), (3, 0), (200, 66), (64, 2), (65, 2), (129, 5), (90, 90), (1, 1), (130, 3), (8, 8)]
    rows = [n for n, _ in lens], [n for _, n in lens]
    seq_lens = torch.tensor(rows[0], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, *rows[1]], device=device).cumsum(0).int()
    constants = {"HEADS": 3, "VERIFY_M": 16, "PREFILL_M": 32, "SPLIT": SHORT_SPLIT, "WINDOW": 70}
    many = work_list.make_work_lists(seq_lens, bounds, sum(rows[1]) + 9, 256, constants)
    monkeypatch.setattr(work_list, "CHUNK", 4)
    few = work_list.make_work_lists(seq_lens, bounds, sum(rows[1]) + 9, 256, constants)
    assert torch.equal(many.num_items, few.num_items) and torch.equal(many.token_rows, few.token_rows)
    own = [i for i, n in enumerate(rows[1]) if 0 < n <= work_list.MAX_VERIFY_LEN]
    assert torch.equal(many.row_slots[own], few.row_slots[own])
    num_verify, num_prefill = many.num_items.tolist()
    assert torch.equal(many.verify_items[:, :num_verify], few.verify_items[:, :num_verify])
    assert torch.equal(many.prefill_items[:, :num_prefill], few.prefill_items[:, :num_prefill])


@pytest.mark.slow
def test_layers_with_and_without_a_window_share_a_steps_lists(device: torch.device) -> None:
    rows = moved(paged_rows([(40, 3), (100, 1), (80, 70)], (2, 1, 16, 16)), device)
    lists = StepLists()
    for window in (None, 7, None, 30, 7):
        alone = paged_attention(*rows.arguments(), scale=0.2, window=window)
        assert torch.equal(paged_attention(*rows.arguments(), scale=0.2, window=window, lists=lists), alone)
    assert len(lists.made) == 3


@pytest.mark.slow
def test_a_write_beyond_32_bits_lands(device: torch.device) -> None:
    """Slots whose numbers begin behind 2^31; pages that nobody touches take no memory on a CPU."""
    groups, width, block_size = 8, 64, 256
    num_blocks = 2**31 // (block_size * groups * width) + 2
    cache = torch.empty(num_blocks, block_size, groups, width, dtype=torch.uint8, device=device).view(FP8)
    small = torch.empty(num_blocks, block_size, groups, 1, dtype=torch.uint8, device=device).view(FP8)
    slot = torch.tensor([num_blocks * block_size - 3, -1], device=device)
    cache[-1] = small[-1] = torch.zeros(1, device=device).to(FP8)
    k, v = torch.randn(2, groups, width, device=device), torch.randn(2, groups, 1, device=device)
    scales = torch.ones(groups, device=device)
    write_kv(k, v, slot, cache, small, scales, scales)
    for stored_at, x in ((cache, k), (small, v)):
        assert torch.equal(stored_at[-1, -3].float(), x[0].to(FP8).float())
    assert not cache[-1, -2:].float().any() and not cache[-1, :-3].float().any()


@pytest.mark.parametrize("is_certain", [True, False])
def test_rejection_at_its_edges_is_the_twins(is_certain: bool, device: torch.device) -> None:
    """No rows, bad rows before and behind the end, impossible and certain drafts, a strided and a cut last row."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(12, 40, generator=generator, dtype=torch.float64)
    scores[1, 7] = float("nan")
    scores[5] = -float("inf")
    scores[6, 1:] = -float("inf")
    scores[8, 3] = -float("inf")
    bounds = torch.tensor([0, 3, 3, 5, 8, 11, 12, 12], dtype=torch.int32)
    drafts = torch.tensor([5, 7, 0, 2, 0, 4, 0, 0, 3, 1, 0, 0])
    q = torch.randn(12, 40, generator=generator, dtype=torch.float64).softmax(1)
    q[[2, 4, 7, 11]] = 0  # of the last rows all but one: there a draft was drawn that could not ride
    q[6] = torch.nn.functional.one_hot(torch.tensor(0), 40)
    laid = torch.zeros(12, 50, dtype=torch.float64)[:, :40].copy_(scores)
    for seed in range(8):
        seeds, positions = torch.full((12,), seed - 4), torch.arange(12) + 2**33
        arguments = [x.to(device) for x in (seeds, positions, drafts, bounds)]
        probs = None if is_certain else q.to(device)
        ours = reject(laid.to(device), probs, *arguments)
        for a, b in zip(ours, reference.reject(scores.to(device), probs, *arguments), strict=True):
            assert torch.equal(a, b)
