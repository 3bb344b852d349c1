"""GGUF: a file of a known architecture becomes an ordinary checkpoint; others are refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec
from specdec.models.sources import resolve
from tests.toys import VOCAB_SIZE, _byte_chars, make_toy

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def _turn(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps the rotary pairs of queries and keys side by side."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: torch.nn.Module, architecture: str = "llama") -> Path:
    """The toy, as a file that llama.cpp's tools would write."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*_byte_chars(), "<bos>", "<eos>", "<pad>", "ab"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        if stem.startswith("layers."):
            _, index, part = stem.split(".", 2)
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
                tensor = _turn(tensor, heads)
            stem = f"blk.{index}.{_NAMES[part]}"
        else:
            stem = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem]
        writer.add_tensor(f"{stem}.{kind}", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _toy(folder: Path) -> torch.nn.Module:
    path = make_toy(folder, intermediate_size=64)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def test_a_gguf_file_says_what_its_source_says(tmp_path: Path) -> None:
    model = _toy(tmp_path / "toy")
    file = write_gguf(tmp_path / "toy.gguf", model)
    made = specdec.LLM(str(file), "ngram", dtype="float32", num_kv_blocks=16)
    prompt = [1, 2, 3, 4, 5]
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, 5:].tolist()
    [out] = made.generate([prompt], specdec.SamplingParams(temperature=0, max_tokens=12))
    assert out.outputs[0].token_ids == expected
    assert made.tokenizer is not None and made.tokenizer.has_chat_template
    assert made.tokenizer.decode(made.tokenizer.encode("héllo")) == "héllo"
    assert 257 in made.engine.target.model.eos_token_ids
    assert made.model_path == resolve(str(file))  # the second time it is only looked up


def test_an_architecture_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", _toy(tmp_path / "toy"), architecture="frobnicator")
    with pytest.raises(specdec.ModelLoadError, match=r"cannot read odd\.gguf.*frobnicator"):
        resolve(str(file))
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("this is no model")
    with pytest.raises(specdec.ModelLoadError, match=r"cannot read text\.gguf"):
        resolve(str(file))
