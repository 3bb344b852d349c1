"""The unrolled head is the head as it drafts, one row and one step at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.checkpoint import HeadFacts, load_head, save_head, vocabulary_maps
from draft_models.head import Eagle3Head, HeadConfig, Rows
from draft_models.loss import cross_entropy

CONFIG = HeadConfig(
    hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    rms_norm_eps=1e-5, rope_theta=100.0, vocab_size=40, draft_vocab_size=12,
)  # fmt: skip


@pytest.fixture
def head() -> Eagle3Head:
    torch.manual_seed(0)
    made = Eagle3Head(CONFIG).double()
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def _turn(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of heads [n, d] by complex numbers."""
    half = x.shape[-1] // 2
    angles = position * CONFIG.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean() + CONFIG.rms_norm_eps).sqrt()


def _row(head: Eagle3Head, feature: Tensor, token: Tensor, position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One row of the fact sheet's section 3.3; its key and value join `past`."""
    layer = head.midlayer
    joined = torch.cat([_norm(token, layer.input_layernorm.weight), _norm(feature, layer.hidden_norm.weight)])
    split = lambda x: x.view(-1, CONFIG.head_dim)  # noqa: E731
    past.append((_turn(split(layer.self_attn.k_proj(joined)), position), split(layer.self_attn.v_proj(joined))))
    queries = _turn(split(layer.self_attn.q_proj(joined)), position)
    heads = []
    for n, query in enumerate(queries):
        group = n // (CONFIG.num_attention_heads // CONFIG.num_key_value_heads)
        weights = torch.stack([query @ k[group] / CONFIG.head_dim**0.5 for k, _ in past]).softmax(0)
        heads.append(sum(w * v[group] for w, (_, v) in zip(weights, past, strict=True)))
    y = feature + layer.self_attn.o_proj(torch.cat(heads))
    inner = _norm(y, layer.post_attention_layernorm.weight)
    return y + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner))


def _drafted(head: Eagle3Head, ids: Tensor, features: Tensor, embedding: Tensor, row: int, steps: int) -> list[Tensor]:
    """True rows up to `row`, then the head on its own outputs: a request with nothing else beside it."""
    past: list[tuple[Tensor, Tensor]] = []
    for j in range(row + 1):
        out = _row(head, head.fc(features[j]), embedding[ids[j + 1]], j, past)
    outs = [out]
    for step in range(1, steps):
        outs.append(_row(head, outs[-1], embedding[ids[row + 1 + step]], row + step, past))
    return outs


def _rows(lengths: list[int], firsts: list[int]) -> Rows:
    torch.manual_seed(1)
    ids = torch.randint(0, 40, (len(lengths), max(lengths)))
    features = torch.randn(len(lengths), max(lengths), 48, dtype=torch.float64)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
        features[row, length:] = 0.0
    counts = [n - 2 - f for n, f in zip(lengths, firsts, strict=True)]
    return Rows(ids, features, torch.tensor(firsts), torch.tensor(counts))


@torch.no_grad()
def test_every_unrolled_step_is_what_the_head_drafts_alone(head: Eagle3Head) -> None:
    rows, embedding = _rows([9, 6], [2, 0]), torch.randn(40, 16, dtype=torch.float64)
    for step, out in enumerate(head(rows, embedding, 3)):
        for b, r in rows.valid(step).nonzero().tolist():
            row = int(rows.first[b]) + r
            wanted = _drafted(head, rows.ids[b], rows.features[b], embedding, row, step + 1)[step]
            assert torch.allclose(out[b, r], wanted, rtol=1e-5, atol=1e-4), (step, b, r)  # angles are fp32


@torch.no_grad()
def test_a_token_moved_by_one_is_noticed(head: Eagle3Head) -> None:
    """Negative control of the test above."""
    rows, embedding = _rows([9], [2]), torch.randn(40, 16, dtype=torch.float64)
    first = next(head(rows, embedding, 1))
    moved = _drafted(head, rows.ids[0].roll(1), rows.features[0], embedding, 2, 1)[0]
    assert not torch.allclose(first[0, 0], moved, atol=1e-2)


def test_gradients_reach_every_weight(head: Eagle3Head) -> None:
    rows, embedding = _rows([9, 6], [2, 0]), torch.randn(40, 16, dtype=torch.float64)
    total = sum(head.lm_head(head.norm(out)).square().sum() for out in head(rows, embedding, 2))
    total.backward()
    assert not [n for n, p in head.named_parameters() if p.grad is None or not p.grad.abs().sum()]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_the_joint_loss_and_its_gradients_are_those_of_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    """Against torch's own, in float64, over more rows than one chunk holds."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(300, 24, generator=generator), torch.randn(60, 24, generator=generator) * 0.3
    law, rows = torch.randn(400, 60, generator=generator).softmax(-1), torch.randperm(400, generator=generator)[:300]
    inputs = [x.clone().requires_grad_() for x in (hidden, head)]
    weights = torch.rand(300, generator=generator) / 300
    loss = cross_entropy(*inputs, law.to(dtype), rows, weights)
    (3 * loss).backward()
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    wanted = F.cross_entropy(F.linear(*exact), law.double()[rows], reduction="none") @ weights.double()
    (3 * wanted).backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=tolerance)
    for found, true in zip(inputs, exact, strict=True):
        assert (found.grad - true.grad).norm() < tolerance * true.grad.norm()
        assert found.grad.dtype == torch.float32


def test_a_checkpoint_comes_back_and_its_maps_agree(head: Eagle3Head, tmp_path: Path) -> None:
    ids = torch.tensor([0, 2, 3, 5, 8, 9, 20, 21, 22, 30, 38, 39])
    save_head(tmp_path, head, HeadFacts((1, 2, 4), "toy", "abc", ids))
    again, facts = load_head(tmp_path)
    assert torch.equal(facts.draft_ids, ids) and facts.feature_layer_ids == (1, 2, 4) and facts.base == "abc"
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(torch.bfloat16).float())
    maps = vocabulary_maps(ids, 40)
    assert torch.equal(maps["t2d"].nonzero()[:, 0], torch.arange(12) + maps["d2t"])


def test_a_foreign_directory_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match="expected architectures"):
        load_head(tmp_path)


def test_unsorted_draft_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        vocabulary_maps(torch.tensor([3, 1]), 5)
