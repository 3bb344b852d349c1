"""Toy checkpoints: tiny random weights and a byte tokenizer, written as ordinary directories.

They let the engine be tested in milliseconds. Nothing here is random between runs: a seed fixes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 260  # 256 bytes, BOS, EOS, PAD, one spare

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "initializer_range": 0.2,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0..255; BOS 256, EOS 257, PAD 258."""
    alphabet = {char: value for value, char in enumerate(_byte_chars())}
    special = {"<bos>": 256, "<eos>": 257, "<pad>": 258, "<spare>": 259}
    inner = Tokenizer(models.BPE(vocab={**alphabet, **special}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _byte_chars() -> list[str]:
    """The printable stand-in of every byte, in byte order (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def make_toy(directory: Path, family: str = "llama", *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> str:
    """Write a tiny random model of a transformers family; return its directory.

    Weights are stored in float64 so that every precision can be asked for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(family, **{**_SMALL, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms start at one (or zero): move them, so that a lost norm shows
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    if tokenizer:
        byte_tokenizer().save_pretrained(directory)
    return str(directory)
