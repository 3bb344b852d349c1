"""Published layouts load and compute what straight lines compute; what does not belong is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.config import ModelConfig
from specdec.errors import ModelLoadError, UnsupportedModelError
from specdec.kernels import native
from specdec.models.eagle_config import feature_layer_ids, read_config
from specdec.models.eagle_head import EagleHead, is_feature_draft, load_eagle
from specdec.models.eagle_runner import EagleRunner
from specdec.models.forward_batch import Segment
from specdec.models.loaded import LoadedModel
from specdec.models.loader import load
from specdec.models.runner import ModelRunner
from tests.drafts.eagle_oracle import Straight
from tests.drafts.eagle_toys import HEADS, KV_HEADS, MLP, WIDTH, safeai_config, streams, tensors, write
from tests.toys import VOCAB_SIZE, make_toy

LAYERS = (0, 2, 3)
OURS = {"specdec": {"feature_layer_ids": list(LAYERS), "feature_convention": "entry"}}
IDS = [11 * i % 257 for i in range(21)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = make_toy(tmp_path_factory.mktemp("layouts") / "target", tokenizer=False)
    return load(ModelConfig(model=directory, dtype="float64"))


def embedding(target: LoadedModel) -> Tensor:
    return target.module.get_input_embeddings().weight.detach()  # type: ignore[operator]


def speculators(
    weights: dict[str, Tensor], target: LoadedModel, **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As RedHatAI/*-speculator.eagle3: layers.0.*, an embedding in the file, a nested layer config."""
    model_type = changes.pop("model_type", "llama")
    layer = {
        "model_type": model_type, "hidden_size": WIDTH, "intermediate_size": MLP, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **changes.pop("layer", {}),
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.2.0",
        "draft_vocab_size": 120, "eagle_aux_hidden_state_layer_ids": list(LAYERS), "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "toy"}}, **changes,
    }  # fmt: skip
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in weights.items()}
    return config, {**renamed, "embed_tokens.weight": embedding(target)}


def extra(names: list[str], widths: list[int]) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(9)
    return {
        n: 1 + 0.2 * torch.randn(w, generator=source, dtype=torch.float64) for n, w in zip(names, widths, strict=True)
    }


def make(kind: str, target: LoadedModel) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Config, tensors and the facts for the oracle, of one layout."""
    facts: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "eps": 1e-5, "base": 10000.0}
    weights = tensors()
    if kind == "SafeAILab":
        return safeai_config(**OURS), weights, facts
    if kind == "SpecForge, eagle_config":
        ids = {"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}  # outputs of layers
        config = safeai_config(architectures=["LlamaForCausalLMEagle3"], rope_theta=1000000, eagle_config=ids)
        return config, weights, {**facts, "base": 1e6}
    if kind == "wide heads":  # as Qwen3-4B's: heads times head_dim is not the width
        return safeai_config(head_dim=32, **OURS), tensors(head_dim=32), facts
    if kind == "whole vocabulary":
        lm_head = torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        kept = {k: v for k, v in weights.items() if k not in ("d2t", "t2d")}
        return safeai_config(draft_vocab_size=None, **OURS), {**kept, "lm_head.weight": 0.2 * lm_head}, facts
    if kind == "speculators":
        return *speculators(weights, target), {**facts, "residual_normed": True}
    if kind == "speculators, plain residual":
        return *speculators(weights, target, norm_before_residual=False), facts
    if kind == "speculators, qwen3 layer":
        weights |= extra([f"midlayer.self_attn.{n}_norm.weight" for n in "qk"], [16, 16])
        return *speculators(weights, target, model_type="qwen3"), {**facts, "residual_normed": True}
    if kind == "speculators, newest defaults":
        weights |= extra(["input_norm.weight"], [192])
        layer = {"layer_types": ["sliding_attention"], "sliding_window": 6}
        changes = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "layer": layer}
        found = {"residual_normed": True, "feedback_normed": True, "norms": 1, "window": 6}
        return *speculators(weights, target, **changes), {**facts, **found}
    assert kind == "EAGLE-3.1"
    weights |= extra([f"fc_norm.{i}.weight" for i in range(3)], [64] * 3)
    return (
        safeai_config(fc_norm=True, norm_output=True, **OURS),
        weights,
        {**facts, "norms": 3, "feedback_normed": True},
    )


KINDS = (
    "SafeAILab", "SpecForge, eagle_config", "wide heads", "whole vocabulary", "speculators",
    "speculators, plain residual", "speculators, qwen3 layer", "speculators, newest defaults", "EAGLE-3.1",
)  # fmt: skip


def drafts_of(head: EagleHead, hidden: Tensor, depth: int) -> tuple[list[int], list[float], Tensor]:
    """What the loaded head drafts behind IDS, its pairs written in two chunks."""
    runner = EagleRunner(head, 8, 4)
    table = [5, 2, 7, 0, 6, 1, 3]
    features = runner.fuse(hidden)
    runner.keep([Segment(IDS[1:9], 1, table, 0)], features[:8])
    runner.keep([Segment(IDS[9:20], 9, table, 0)], features[8:19])
    batch = runner.pack([Segment(IDS[20:], 20, table, 0)])
    made = runner.draft(batch, features[19:20], [1] * depth, wants_logits=True)
    assert made.logits is not None
    return made.token_ids[0].tolist(), made.confidences[0].tolist(), made.logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_layout_computes_what_straight_lines_compute(kind: str, target: LoadedModel, tmp_path: Path) -> None:
    config, weights, facts = make(kind, target)
    path = Path(write(tmp_path, config, weights))
    assert is_feature_draft(path)
    canonical = {k.replace("layers.0.", "midlayer."): v for k, v in weights.items()}
    hidden = streams(str(target.path), IDS[:-1], LAYERS)
    drafts, shares, scores = Straight(canonical, embedding(target), **facts).rollout(IDS, hidden, 4)
    found = drafts_of(load_eagle(path, target, torch.float64), hidden, 4)
    assert found[0] == drafts
    assert found[1] == pytest.approx(shares, rel=1e-5)
    assert torch.allclose(found[2], scores, atol=1e-5)


@pytest.mark.skipif(not native.enabled(), reason="no native kernels here")
@pytest.mark.parametrize("kind", ["SafeAILab", "speculators, newest defaults"])
def test_native_code_loads_the_same_head(kind: str, target: LoadedModel, tmp_path: Path) -> None:
    config, weights, _ = make(kind, target)
    path = Path(write(tmp_path, config, weights))
    hidden = streams(str(target.path), IDS[:-1], LAYERS)
    exact = drafts_of(load_eagle(path, target, torch.float64), hidden, 1)
    wide = drafts_of(load_eagle(path, target, torch.float32), hidden, 1)
    coded = drafts_of(load_eagle(path, target, torch.bfloat16), hidden, 1)
    assert torch.allclose(wide[2].double(), exact[2], atol=1e-4)
    assert (coded[2].double() - exact[2]).abs().mean() < 0.05 * exact[2].abs().mean()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [29, 2, 16]}, (2, 16, 29)),
        ({"target_layer_ids": [1, 9, 17, 25, 31]}, (2, 10, 18, 26, 32)),
        ({"specdec": {"feature_layer_ids": [32, 1], "feature_convention": "entry"}}, (32, 1)),
        ({"specdec": {"feature_layer_ids": [0, 31], "feature_convention": "out"}}, (1, 32)),
    ],
)
def test_layer_ids_follow_one_policy(values: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert feature_layer_ids(values, 32) == expected


def test_the_rotary_base_is_the_files_own_or_10000_never_the_targets() -> None:
    assert read_config(safeai_config(), 32).layer.rope_parameters["rope_theta"] == 10000.0
    assert read_config(safeai_config(rope_theta=5e5), 32).layer.rope_parameters["rope_theta"] == 5e5


Change = dict[str, Any]
REFUSED: dict[str, tuple[Change, dict[str, Tensor | None], str]] = {
    "another width of target": ({}, {"fc.weight": torch.zeros(64, 3 * 72)}, "made for another target"),
    "another number of streams": ({}, {"fc.weight": torch.zeros(64, 2 * 64)}, "3 streams of 64"),
    "another vocabulary": ({"vocab_size": 300}, {}, "300 tokens and the target's 260"),
    "a lost tensor": ({}, {"norm.weight": None}, "lacks norm.weight"),
    "a lost map": ({}, {"d2t": None}, "lacks d2t"),
    "an empty map": ({}, {"d2t": torch.zeros(120, dtype=torch.long)}, "exported without its map"),
    "a map beyond the vocabulary": ({}, {"d2t": torch.full((120,), 141)}, "does not lead to ascending ids"),
    "maps that differ": ({}, {"t2d": torch.ones(260, dtype=torch.bool)}, "d2t and t2d name different tokens"),
    "a misshapen tensor": ({}, {"midlayer.mlp.up_proj.weight": torch.zeros(81, 64)}, r"up_proj.weight is \[81, 64\]"),
    "a tensor nobody reads": ({}, {"adapter.weight": torch.zeros(3)}, "holds adapter.weight"),
    "an EAGLE-1 head": ({}, {"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}, "an EAGLE-1 head"),
    "a P-EAGLE head": ({}, {"mask_hidden": torch.zeros(1, 1, 192)}, "a P-EAGLE head"),
    "two layers": ({"num_hidden_layers": 2}, {}, "2 layers deep"),
    "another speculators type": ({"speculators_model_type": "dflash"}, {}, "'dflash'"),
    "another layer": ({"model_type": "gemma2"}, {}, "'gemma2'"),
    "rope that looks at the batch": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "'dynamic'"),
    "layers the target lacks": (
        {"specdec": {"feature_layer_ids": [4, 0, 1], "feature_convention": "entry"}},
        {},
        "0 to 3",
    ),
    "an unknown convention": ({"specdec": {"feature_layer_ids": [1]}}, {}, "'entry' or 'out'"),
    "final outputs as features": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_belong_is_refused_by_name(fault: str, target: LoadedModel, tmp_path: Path) -> None:
    config, changed, message = REFUSED[fault]
    weights: dict[str, Tensor | None] = {**tensors(), **changed}
    path = write(tmp_path, safeai_config(**{**OURS, **config}), {k: v for k, v in weights.items() if v is not None})
    with pytest.raises(ModelLoadError, match=message):
        load_eagle(Path(path), target, torch.float64)


def test_an_ordinary_model_is_no_feature_draft(target: LoadedModel) -> None:
    assert not is_feature_draft(target.path)
    with pytest.raises(UnsupportedModelError, match="no feature draft"):
        load_eagle(target.path, target, torch.float64)


def test_another_tokenizer_is_refused_by_its_first_difference(target: LoadedModel, tmp_path: Path) -> None:
    from tests.toys import byte_tokenizer

    with_tokenizer = load(ModelConfig(model=make_toy(tmp_path / "target"), dtype="float64"))
    path = Path(write(tmp_path / "head", safeai_config(**OURS), tensors()))
    byte_tokenizer().save_pretrained(path)
    load_eagle(path, with_tokenizer, torch.float64)
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace('"<spare>"', '"<other>"'))
    with pytest.raises(ModelLoadError, match="another tokenizer than the target: .*<other>|<spare>"):
        load_eagle(path, with_tokenizer, torch.float64)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_captured_streams_are_those_of_transformers(dtype: str, target: LoadedModel) -> None:
    """float64 runs transformers' modules, float32 the native step where it is built; two rows, one in two chunks."""
    model = load(ModelConfig(model=str(target.path), dtype=dtype))
    runner = ModelRunner(model, 16, 4)
    runner.capture((2, 0, 3))
    runner.forward(runner.pack([Segment(IDS[:8], 0, [3, 9, 1, 4, 6], 0)]))
    runner.forward(runner.pack([Segment(IDS[8:17], 8, [3, 9, 1, 4, 6], 1), Segment(IDS[:5], 0, [2, 8], 1)]))
    expected = streams(str(target.path), IDS[:17], (2, 0, 3))
    assert runner.features is not None and runner.features.shape == (14, 3 * 64)
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert torch.allclose(runner.features[:9].double(), expected[8:], atol=tolerance)
    assert torch.allclose(runner.features[9:].double(), expected[:5], atol=tolerance)


def test_layers_that_are_not_there_cannot_be_captured(target: LoadedModel) -> None:
    with pytest.raises(ValueError, match="feature layer 4 .* 3 layers"):
        ModelRunner(target, 4, 4).capture((4,))


def test_the_written_file_is_what_was_asked(tmp_path: Path) -> None:
    """The fixtures' own check: a layout test is worth what its file is."""
    path = write(tmp_path, safeai_config(), tensors())
    names = load_file(Path(path) / "model.safetensors")
    assert names["d2t"].dtype == torch.int64 and names["t2d"].dtype == torch.bool
    assert names["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
