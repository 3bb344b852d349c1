"""Attention in Triton: as good as PyTorch at every edge; decode and verify rows have the same bits in any company."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.config import MAX_SPECULATIVE_TOKENS
from specdec.kernels.paged_attention import launch, paged_attention, reference
from specdec.kernels.paged_attention.tiles import SPLIT, HeadShape, prefill_tile, verify_tile
from specdec.kernels.paged_attention.work_list import MAX_VERIFY_LEN, make_work_lists
from tests.engines import Oracle, ids, llm, proposing
from tests.kernels.kernel_oracles import PagedRows, assert_as_good_as, paged_rows
from tests.toys import make_toy

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FP8 = torch.float8_e4m3fn
SINKS = torch.linspace(-2, 2, 70)
OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"softcap": 5.0}, {"sinks": True, "window": 7}]
SHAPES = [(6, 2, 40, 24), (4, 2, 32, 32), (5, 1, 80, 80), (8, 1, 128, 128), (2, 2, 17, 9), (70, 1, 16, 16)]
WIDE = [(2, 1, 192, 128), (4, 1, 256, 256), (2, 2, 96, 96), (8, 8, 64, 64)]


def edges(block_size: int) -> list[tuple[int, int]]:
    """(seq_len, query_len) of rows: one token, both sides of a block's end, a split's end, and a prompt chunk."""
    near = [(n, min(n, 3)) for n in (1, block_size - 1, block_size, block_size + 1) if n > 0]
    return [*near, (SPLIT + 2, 5), (MAX_VERIFY_LEN + 2, MAX_VERIFY_LEN + 1)]


FAR = [(SPLIT, 1), (2 * SPLIT + 40, 9), (SPLIT + 1, MAX_VERIFY_LEN), (SPLIT + 70, 100)]


def moved(rows: PagedRows, device: torch.device) -> PagedRows:
    return PagedRows(*(getattr(rows, name).to(device) for name in PagedRows.__dataclass_fields__))


def twin(arguments: tuple[Tensor, ...], scale: float, options: dict[str, Any], **more: Any) -> Tensor:
    """The plain-PyTorch answer, whatever engine the door would choose."""
    q, _, v_cache = arguments[:3]
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    three = (options.get(name) for name in ("window", "softcap", "sinks"))
    reference.paged_attention(*arguments, scale, *three, out, **more)  # type: ignore[arg-type,misc]
    return out


def with_sinks(options: dict[str, Any], rows: PagedRows) -> dict[str, Any]:
    return {**options, "sinks": SINKS[: rows.q.shape[1]].to(rows.q.device)} if "sinks" in options else options


def assert_good(rows: PagedRows, options: dict[str, Any], scale: float = 0.2) -> Tensor:
    options = with_sinks(options, rows)
    out = paged_attention(*rows.arguments(), scale=scale, **options)
    assert_as_good_as(
        out, twin(rows.arguments(), scale, options), twin(rows.arguments(torch.float64), scale, options), floor=2e-6
    )
    return out


@pytest.mark.parametrize("dtype,options", list(zip(DTYPES, OPTIONS)), ids=str)
def test_attention_is_as_good_as_pytorch(dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    assert_good(moved(paged_rows(edges(16), SHAPES[0], 16, dtype), device), options)


def crossed(turn: int, option: int) -> bool:
    """Whether a case is run: all on a GPU; in the interpreter so many that any two axes meet in all their values."""
    return torch.cuda.is_available() or turn % len(OPTIONS) == option


GRID = [
    (dtype, shape, options)
    for d, dtype in enumerate(DTYPES)
    for s, shape in enumerate([*SHAPES, *WIDE])
    for o, options in enumerate(OPTIONS)
    if crossed(d + s, o)
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype,shape,options", GRID, ids=str)
def test_attention_on_the_whole_grid(
    dtype: torch.dtype, shape: tuple[int, int, int, int], options: dict[str, Any], device: torch.device
) -> None:
    """One block size a case, in turn, so that every other axis meets them all."""
    turn = DTYPES.index(dtype) + 2 * [*SHAPES, *WIDE].index(shape) + OPTIONS.index(options)
    block_size = (1, 8, 24, 64, 256)[turn % 5]
    assert_good(moved(paged_rows([*edges(block_size), *FAR], shape, block_size, dtype), device), options)


def quantised(rows: PagedRows, k_scales: Tensor, v_scales: Tensor) -> PagedRows:
    k, v = (cache / scale[:, None] for cache, scale in ((rows.k_cache, k_scales), (rows.v_cache, v_scales)))
    return PagedRows(rows.q, k.to(FP8), v.to(FP8), rows.block_tables, rows.seq_lens, rows.cu_query_lens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_fp8_cache_means_what_its_scales_say(dtype: torch.dtype, device: torch.device) -> None:
    rows = moved(paged_rows([(1, 1), (40, 3), (90, 80)], dtype=dtype), device)
    scales = torch.tensor([0.031, 0.017], device=device), torch.tensor([0.013, 0.02], device=device)
    stored = quantised(rows, *scales)
    named = dict(zip(("k_scales", "v_scales"), scales))
    out = paged_attention(*stored.arguments(), scale=0.2, **named)
    wide = (stored.q.double(), stored.k_cache, stored.v_cache, *stored.arguments()[3:])
    # Against the numbers that are stored: how far those are from the real ones is the format's affair.
    assert_as_good_as(
        out, twin(stored.arguments(), 0.2, {}, **named), twin(wide, 0.2, {}, **named), slack=2.5, floor=2e-6
    )


@pytest.mark.parametrize("is_native", [False, True])
def test_every_e4m3_byte_is_read_exactly(
    is_native: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A context of one token: what comes out is its value, so 256 values wide shows all 256 bytes."""
    if is_native and device.type == "cuda" and not launch._has_fp8(device):
        pytest.skip("this GPU does not convert e4m3")
    monkeypatch.setattr(launch, "_has_fp8", lambda _: is_native)
    every = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).view(1, 1, 1, 256)
    k = torch.zeros(1, 1, 1, 16, device=device).to(FP8)
    one = torch.ones(1, dtype=torch.int32, device=device)
    out = paged_attention(
        torch.ones(1, 1, 16, device=device),
        k,
        every,
        torch.zeros_like(one)[None],
        one,
        torch.tensor([0, 1]).to(one),
        1.0,
    )
    out, expected = out.flatten(), every.flatten().float()
    if is_native and device.type == "cpu":  # the interpreter's own conversion takes NaN for 480
        assert torch.equal(out[expected.isfinite()], expected[expected.isfinite()])
    else:
        assert torch.equal(out.nan_to_num(1e6), expected.nan_to_num(1e6))


def company(dtype: torch.dtype, device: torch.device, most: int = 9) -> PagedRows:
    """Eight rows of `most` queries: contexts that end before, on and after the end of a block and of a split."""
    ends = (9, 15, 16, 17, 24, 33, 40, SPLIT + 4)
    return moved(paged_rows([(n, most) for n in ends], (3, 1, 32, 32), 16, dtype), device)


def cut(rows: PagedRows, num_rows: int, query_len: int, first: int = 0) -> tuple[Tensor, ...]:
    """The first `query_len` queries of some rows, as if the later ones had not been drafted."""
    most = int(rows.cu_query_lens[1])
    taken = slice(first, first + num_rows)
    q = rows.q.view(-1, most, *rows.q.shape[1:])[taken, :query_len].flatten(0, 1)
    bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device) * query_len
    lens = rows.seq_lens[taken] - (most - query_len)
    return q, rows.k_cache, rows.v_cache, rows.block_tables[taken], lens, bounds


def test_a_query_has_the_same_bits_whoever_rides_along(device: torch.device) -> None:
    """K = 0..8 drafts and 1..8 rows."""
    rows = company(torch.bfloat16, device)
    full = paged_attention(*cut(rows, 8, 9), scale=0.2).view(8, 9, 3, 32)
    for query_len in range(1, 10):
        num_rows = 9 - query_len if query_len < 9 else 1
        out = paged_attention(*cut(rows, num_rows, query_len, 8 - num_rows), scale=0.2).view(num_rows, query_len, 3, 32)
        assert torch.equal(out, full[8 - num_rows :, :query_len]), f"{query_len} queries, {num_rows} rows"


BITS = [
    (dtype, options)
    for d, dtype in enumerate(DTYPES)
    for o, options in enumerate(OPTIONS)
    if crossed(d, o) or crossed(d + 1, o)
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype,options", BITS, ids=str)
def test_a_query_has_the_same_bits_for_all_k_and_batches(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device
) -> None:
    rows = company(dtype, device)
    options = with_sinks(options, rows)
    full = paged_attention(*cut(rows, 8, 9), scale=0.2, **options).view(8, 9, 3, 32)
    for query_len in range(1, 10):
        for num_rows in range(1, 9):
            out = paged_attention(*cut(rows, num_rows, query_len, 8 - num_rows), scale=0.2, **options)
            assert torch.equal(out.view(num_rows, query_len, 3, 32), full[8 - num_rows :, :query_len])


def test_a_prompt_beside_it_changes_no_bit_of_a_decoding_row(device: torch.device) -> None:
    rows = moved(paged_rows([(SPLIT + 30, 3), (92, 90), (40, 1)], (3, 1, 32, 32)), device)
    together = paged_attention(*rows.arguments(), scale=0.2)
    for row, tokens in ((0, slice(0, 3)), (2, slice(93, 94))):
        bounds = rows.cu_query_lens[row : row + 2] - rows.cu_query_lens[row]
        alone = (rows.q[tokens], rows.k_cache, rows.v_cache, rows.block_tables[row : row + 1])
        out = paged_attention(*alone, rows.seq_lens[row : row + 1], bounds, scale=0.2)
        assert torch.equal(out, together[tokens])


def test_other_splits_would_show_in_the_bits(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Negative control: the comparison above does see another order of the same sums."""
    rows = moved(paged_rows([(200, 3)], (3, 1, 32, 32)), device)
    usual = paged_attention(*rows.arguments(), scale=0.2)
    monkeypatch.setattr(launch, "SPLIT", 64)
    other = paged_attention(*rows.arguments(), scale=0.2)
    assert not torch.equal(usual, other) and torch.allclose(usual, other, atol=1e-5)


@pytest.mark.slow
def test_rows_take_turns_where_partial_sums_would_not_fit(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    rows = moved(paged_rows([(40, 3), (SPLIT + 8, 2), (70, 66), (5, 1), (7, 0)], (3, 1, 32, 32)), device)
    q = torch.cat([rows.q, rows.q[:2]])  # two padded tokens
    at_once = paged_attention(q, *rows.arguments()[1:], scale=0.2)
    monkeypatch.setattr(launch, "MOST_WORKSPACE", 1)
    in_turn = paged_attention(q, *rows.arguments()[1:], scale=0.2)
    assert torch.equal(at_once, in_turn) and not in_turn[-2:].any()


def test_padding_is_zero_and_empty_rows_are_skipped(device: torch.device) -> None:
    rows = moved(paged_rows([(20, 2), (5, 1)]), device)
    rows.cu_query_lens = torch.tensor([0, 2, 2], dtype=torch.int32, device=device)
    out = paged_attention(*rows.arguments(), scale=0.125)
    assert not out[2:].any() and out[:2].isfinite().all() and out[:2].any()


def test_blocks_that_slid_out_of_the_window_are_not_read(device: torch.device) -> None:
    rows = moved(paged_rows([(100, 2), (200, 80)], block_size=16), device)
    out = paged_attention(*rows.arguments(), scale=0.125, window=10)
    rows.block_tables[0, :5] = rows.block_tables[1, :6] = -(10**6)  # the queries see positions from 89 and 111 on
    assert torch.equal(out, paged_attention(*rows.arguments(), scale=0.125, window=10))


@pytest.mark.slow
def test_a_row_with_nan_fails_alone(device: torch.device) -> None:
    rows = moved(paged_rows([(20, 2), (40, 3), (SPLIT + 9, 1)]), device)
    rows.k_cache[int(rows.block_tables[0, 0]), 3] = float("nan")
    out = paged_attention(*rows.arguments(), scale=0.125)
    assert out[:2].isnan().any() and out[2:].isfinite().all()


@pytest.mark.slow
def test_queries_may_lie_heads_first(device: torch.device) -> None:
    """As transformers hands them over: a view of [H, T, D]."""
    rows = moved(paged_rows([(30, 3), (90, 70)]), device)
    out = paged_attention(*rows.arguments(), scale=0.125)
    rows.q = rows.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(out, paged_attention(*rows.arguments(), scale=0.125))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"seq_lens": torch.tensor([20])}, "seq_lens is torch.int64 with stride 1; it must be int32"),
        ({"k_cache": torch.zeros(4, 16, 64, 2).transpose(2, 3)}, "k_cache has strides"),
        ({"sinks": torch.zeros(5)}, r"sinks has shape \(5,\); it must be 6 numbers"),
        ({"block_tables": torch.zeros(1, 4, dtype=torch.int32, device="meta")}, "block_tables is on meta"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_kernels_would_read_wrongly_is_refused(
    broken: dict[str, Tensor], sentence: str, device: torch.device
) -> None:
    names = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "cu_query_lens")
    arguments: dict[str, Any] = dict(zip(names, moved(paged_rows([(20, 2)]), device).arguments()))
    broken = {name: x if x.is_meta else x.to(device) for name, x in broken.items()}
    if "k_cache" in broken:
        arguments["v_cache"] = arguments["v_cache"][:4]
    with pytest.raises(ValueError, match=sentence):
        paged_attention(**{**arguments, **broken}, scale=1.0)


lengths = st.tuples(st.integers(1, 2 * SPLIT + 5), st.integers(1, MAX_VERIFY_LEN + 20)).map(lambda x: (max(x), min(x)))
drawn = {
    "lens": st.lists(lengths, min_size=1, max_size=3),
    "block_size": st.sampled_from([1, 3, 8, 16, 32, 256]),
    "groups": st.integers(1, 2),
    "heads": st.integers(1, 5),
    "widths": st.tuples(st.integers(1, 40), st.integers(1, 40)),
    "window": st.one_of(st.none(), st.integers(1, SPLIT + 3)),
}


def agrees(
    lens: list[tuple[int, int]], block_size: int, groups: int, heads: int, widths: tuple[int, int], window: int | None
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = moved(paged_rows(lens, (groups * heads, groups, *widths), block_size), device)
    assert_good(rows, {"window": window})


no_deadline = {"deadline": None, "suppress_health_check": list(HealthCheck)}
test_any_batch_agrees_with_the_twin = settings(max_examples=1, derandomize=True, **no_deadline)(given(**drawn)(agrees))
test_many_batches_agree_with_the_twin = pytest.mark.slow(
    settings(max_examples=150, derandomize=True, **no_deadline)(given(**drawn)(agrees))
)


def test_the_work_lists_hold_every_tile_once_and_nothing_else(device: torch.device) -> None:
    lens = [(1, 1), (SPLIT, 3), (SPLIT + 1, 65), (700, 66), (5, 0), (2000, 2)]
    query_lens = torch.tensor([0] + [query_len for _, query_len in lens])
    num_tokens = int(query_lens.sum())
    constants = {"HEADS": 3, "VERIFY_M": 16, "PREFILL_M": 64, "SPLIT": SPLIT, "WINDOW": 600}
    seq_lens = torch.tensor([n for n, _ in lens], dtype=torch.int32, device=device)
    made = make_work_lists(seq_lens, query_lens.cumsum(0).int().to(device), num_tokens + 4, 2048, constants)
    verify, prefill, slots = [], [], 0
    for row, (seq_len, query_len) in enumerate(lens):
        first = max(0, seq_len - query_len - 599) // SPLIT
        splits = range(first, -(-seq_len // SPLIT))
        if 0 < query_len <= MAX_VERIFY_LEN:
            verify += [(row, tile, split) for split in splits for tile in range(-(-query_len * 3 // 16))]
            assert made.row_slots[row] + first * query_len == slots
            slots += len(splits) * query_len
        elif query_len:
            prefill += [(row, tile) for tile in reversed(range(-(-query_len * 3 // 64)))]
    assert made.num_items.tolist() == [len(verify), len(prefill)]
    assert made.verify_items[:, : len(verify)].T.tolist() == [list(item) for item in verify]
    assert made.prefill_items[:, : len(prefill)].T.tolist() == [list(item) for item in prefill]
    rows_of_tokens = [row for row, (_, query_len) in enumerate(lens) for _ in range(query_len)]
    assert made.token_rows.tolist() == [*rows_of_tokens, *[len(lens)] * 4]
    assert len(verify) <= made.verify_items.shape[1] and slots <= made.num_slots


@pytest.mark.parametrize("heads", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
def test_five_tokens_read_the_keys_once(heads: int, width: int) -> None:
    """Where registers allow: one tile of verification holds them all, and no tile depends on their number."""
    shape = HeadShape(heads, width, width, 2)
    tile = verify_tile(shape)
    assert tile.block_m >= min(5 * heads, 64, 16384 // shape.width) and SPLIT % tile.block_n == 0
    assert prefill_tile(shape).block_m >= 64


def test_every_row_that_verifies_takes_the_path_with_fixed_splits() -> None:
    assert MAX_SPECULATIVE_TOKENS + 1 <= MAX_VERIFY_LEN


@pytest.mark.slow
def test_a_cache_beyond_32_bits_is_addressed(device: torch.device) -> None:
    """More than 2^31 numbers: the last block is read where it lies. Takes 2.2 GB."""
    block_size, groups, width = 256, 8, 64
    num_blocks = 2**31 // (block_size * groups * width) + 2
    k = torch.empty(num_blocks, block_size, groups, width, dtype=torch.uint8, device=device).view(FP8)
    v = torch.zeros(num_blocks, block_size, groups, 1, dtype=torch.uint8, device=device).view(FP8)
    k[-1] = torch.randn(block_size, groups, width).to(FP8).to(device)
    v[-1] = torch.randn(block_size, groups, 1).to(FP8).to(device)
    table = torch.tensor([[num_blocks - 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([200], dtype=torch.int32, device=device)
    for query_len in (2, 70):
        bounds = torch.tensor([0, query_len], dtype=torch.int32, device=device)
        q = torch.randn(query_len, groups, width, device=device)
        arguments = (q, k[-1:].clone(), v[-1:].clone(), torch.zeros_like(table), lens, bounds)
        out = paged_attention(q, k, v, table, lens, bounds, 0.125)
        assert torch.allclose(out, twin(arguments, 0.125, {}), atol=1e-5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_toy(tmp_path_factory.mktemp("toys") / "llama", num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_verified_drafts_leave_the_ids_of_the_twins(
    params: dict[str, Any], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where no rounding excuses a fork; four drafts a step, all of them right."""
    made, prompts = llm(target, None, dtype="float64", block_size=8), [[1, 2, 3], list(range(40, 57))]
    params["max_tokens"] = 6
    with monkeypatch.context() as environment:
        environment.setenv("SPECDEC_KERNELS", "reference")
        expected = ids(made, prompts, **params)
    assert ids(made, prompts, **params) == expected
    with proposing(made, Oracle({tuple(p): answer for p, answer in zip(prompts, expected)}), 4):
        assert ids(made, prompts, **params) == expected
