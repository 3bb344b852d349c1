"""A feature draft's head: native code computes what its plain-PyTorch twin computes, whoever shares the call."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_oracles import WAYS, needs_native, needs_tiles

from specdec.kernels.eagle_forward import EagleWeights, Pairs, draft, fuse, keep, pack_eagle
from specdec.kernels.linear import groups
from specdec.kernels.llama_forward import LayerWeights, LlamaShape

WIDTH, STREAMS, VOCAB, DRAFT_VOCAB, BLOCK_SIZE = 48, 96, 97, 41, 8
SHAPE = LlamaShape(num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5, scale=0.25)


def head(seed: int = 0, **changes: Any) -> EagleWeights:
    """Random weights of every kind the op knows."""
    source = torch.Generator().manual_seed(seed)

    def new(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=source) * (0.3 if len(size) == 1 else 0.15)

    angles = torch.arange(200)[:, None] * 0.3 ** torch.arange(8)
    angles = torch.cat([angles, angles], 1)
    layer = LayerWeights(
        input_norm=1 + new(WIDTH), qkv=new(8 * 16, 2 * WIDTH), qkv_bias=new(8 * 16), q_norm=1 + new(16),
        k_norm=1 + new(16), out=new(WIDTH, 64), out_bias=new(WIDTH), post_norm=1 + new(WIDTH), gate=new(72, WIDTH),
        up=new(72, WIDTH), down=new(WIDTH, 72), window=changes.pop("window", None),
    )  # fmt: skip
    weights = EagleWeights(
        shape=SHAPE, fc=new(WIDTH, STREAMS), fc_bias=new(WIDTH), feature_norm=1 + new(STREAMS), num_feature_norms=2,
        embedding=new(VOCAB, WIDTH), hidden_norm=1 + new(WIDTH), layer=layer, norm=1 + new(WIDTH),
        head=new(DRAFT_VOCAB, WIDTH), target_ids=torch.randperm(VOCAB, generator=source)[:DRAFT_VOCAB].sort().values,
        cos=angles.cos(), sin=angles.sin(), is_residual_normed=False, is_feedback_normed=False,
    )  # fmt: skip
    return replace(weights, **changes)


def rows(lens: list[int], depth: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and streams of ragged rows, and a table of scattered blocks that covers them and their drafts."""
    source = torch.Generator().manual_seed(seed)
    blocks = -(-(max(lens) + depth) // BLOCK_SIZE)
    tables = torch.randperm(len(lens) * blocks, generator=source).view(len(lens), blocks).to(torch.int32)
    tokens = torch.randint(VOCAB, (len(lens), max(lens)), generator=source)
    return tokens, torch.randn(len(lens), max(lens), STREAMS, generator=source), tables


def run(model: Any, lens: list[int], num_active: list[int], dtype: torch.dtype = torch.float32) -> Any:
    """Keep all of each row but its last token, then draft from that."""
    depth = len(num_active)
    tokens, streams, tables = rows(lens, depth)
    cache = tuple(torch.full((int(tables.max()) + 1, BLOCK_SIZE, 2, 16), torch.nan, dtype=dtype) for _ in range(2))
    features = fuse(model, streams.flatten(0, 1)).unflatten(0, tokens.shape)
    at = [(r, t) for r, length in enumerate(lens) for t in range(1, length - 1)]
    if at:
        r, t = (torch.tensor(x) for x in zip(*at, strict=True))
        slots = tables[r, t // BLOCK_SIZE].long() * BLOCK_SIZE + t % BLOCK_SIZE
        keep(model, Pairs(tokens[r, t], t, features[r, t - 1]), slots, cache)
    r, t = torch.arange(len(lens)), torch.tensor(lens) - 1
    return draft(model, Pairs(tokens[r, t], t, features[r, t - 1]), tables, num_active, cache, wants_logits=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "plain": {"fc_bias": None, "feature_norm": None, "num_feature_norms": 0},
    "one norm": {"num_feature_norms": 1},
    "normed residual": {"is_residual_normed": True},
    "normed feedback": {"is_feedback_normed": True},
    "window": {"window": 5},
}


@needs_native
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_code_equals_the_twin(variant: str) -> None:
    weights = head(**VARIANTS[variant])
    packed = pack_eagle(weights, torch.float32)
    assert not isinstance(packed, EagleWeights)
    expected, found = (run(model, [30, 9, 2], [3, 2, 1]) for model in (weights, packed))
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.allclose(found.confidences, expected.confidences, atol=1e-5)
    assert torch.allclose(found.features, expected.features, atol=1e-4)
    assert torch.allclose(found.logits[:1], expected.logits, atol=1e-4)


@needs_native
@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_every_variant_is_another_function(variant: str) -> None:
    """The negative control of the test above: a forgotten flag would show."""
    base = run(head(), [30], [1, 1])
    other = run(head(**VARIANTS[variant]), [30], [1, 1])
    assert not torch.allclose(base.logits, other.logits, atol=1e-3)


@needs_native
@pytest.mark.parametrize("num_bits", [None, 8])
@pytest.mark.parametrize(("dtype", "amx"), WAYS)
def test_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, amx: str, num_bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    packed = pack_eagle(head(), dtype, num_bits)
    lens = [40, 17, 2]
    together = run(packed, lens, [3, 3, 3], dtype)
    tokens, streams, tables = rows(lens, 3)
    for r, length in enumerate(lens):
        cache = tuple(torch.zeros(int(tables.max()) + 1, BLOCK_SIZE, 2, 16, dtype=dtype) for _ in range(2))
        for t in range(1, length - 1):  # one by one
            feature = fuse(packed, streams[r, t - 1 : t])
            slot = tables[r, t // BLOCK_SIZE].long()[None] * BLOCK_SIZE + t % BLOCK_SIZE
            keep(packed, Pairs(tokens[r, t : t + 1], torch.tensor([t]), feature), slot, cache)
        pair = Pairs(
            tokens[r, length - 1 : length],
            torch.tensor([length - 1]),
            fuse(packed, streams[r, length - 2 : length - 1]),
        )
        alone = draft(packed, pair, tables[r : r + 1], [1, 1, 1], cache)
        assert torch.equal(alone.token_ids[0], together.token_ids[r])
        assert torch.equal(alone.confidences[0], together.confidences[r])


@needs_native
def test_one_call_of_depth_three_is_three_calls_of_depth_one() -> None:
    packed = pack_eagle(head(), torch.float32)
    whole = run(packed, [30], [1, 1, 1])
    tokens, streams, tables = rows([30], 3)
    cache = tuple(torch.zeros(int(tables.max()) + 1, BLOCK_SIZE, 2, 16) for _ in range(2))
    features = fuse(packed, streams[0])
    t = torch.arange(1, 29)
    keep(packed, Pairs(tokens[0, t], t, features[t - 1]), tables[0, t // 8].long() * 8 + t % 8, cache)
    token, feature = tokens[0, 29:30], features[28:29]
    for step in range(3):
        made = draft(packed, Pairs(token, torch.tensor([29 + step]), feature), tables, [1], cache)
        token, feature = made.token_ids[:, 0], made.features
        assert token[0] == whole.token_ids[0, step]
    assert torch.equal(feature, whole.features)


@needs_tiles
@pytest.mark.parametrize("num_bits", [None, 8])
def test_tiles_stay_close(num_bits: int | None) -> None:
    weights = head()
    weights = replace(weights, layer=replace(weights.layer, qkv=from_four_bits(weights.layer.qkv)))
    wide, tiled = (run(pack_eagle(weights, *how), [30], [1]) for how in ((torch.float32,), (torch.bfloat16, num_bits)))
    error = (wide.logits - tiled.logits).abs().mean() / wide.logits.abs().mean()
    assert 1e-4 < error < 0.05


def from_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Half of the rows as codes of 4 bits decode: queries and keys may not end in two layouts."""
    found = groups.to_groups(weight[: len(weight) // 2], 4)
    assert found is not None
    return torch.cat([groups.decode(found), weight[len(weight) // 2 :]])


@needs_native
def test_codes_of_eight_bits_stay_close() -> None:
    weights = head()
    wide, coded = (run(pack_eagle(weights, torch.float32, bits), [30], [1]) for bits in (None, 8))
    error = (wide.logits - coded.logits).abs().mean() / wide.logits.abs().mean()
    assert 1e-5 < error < 0.05  # it is another number, and a near one


@needs_native
def test_what_lies_out_of_range_is_refused() -> None:
    packed = pack_eagle(head(), torch.float32)
    cache = tuple(torch.zeros(40, BLOCK_SIZE, 2, 16) for _ in range(2))
    tables = torch.arange(40, dtype=torch.int32)[None]
    for token, position in ((VOCAB, 5), (-1, 5), (3, 0), (3, 200)):
        pair = Pairs(torch.tensor([token]), torch.tensor([position]), torch.zeros(1, WIDTH))
        with pytest.raises(IndexError, match="97"):
            draft(packed, pair, tables, [1, 1], cache)
