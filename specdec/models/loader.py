"""Loading: from a model name to modules in memory that passed the gate.

It knows checkpoints, dtypes, EOS and tokenizers. It does not know caches, steps or requests.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from specdec.config import ModelConfig
from specdec.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from specdec.kernels import native
from specdec.kernels.linear import Quantization
from specdec.kernels.llama_forward import PackedLlama
from specdec.models import sources
from specdec.models.attention import IMPLEMENTATION, AttentionProbe
from specdec.models.fast_llama import pack_fast
from specdec.models.gate import check_config, check_model
from specdec.models.loaded import LoadedModel
from specdec.models.packed import pack_linears
from specdec.models.quantized import describe_weights, finish, quantization_of, stored_dtype, weights_held
from specdec.models.selftest import self_test

logger = logging.getLogger("specdec")


def pick_device(name: str) -> torch.device:
    """ "auto" is the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequestError(f"device is {name!r}; {error}", param="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError(f"device is {name!r}, but torch sees no GPU here", param="device")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 wherever it is fast: on GPUs that have it and on CPUs with our kernels."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if native.enabled() else torch.float32


def load(config: ModelConfig, *, packs_whole: bool = True) -> LoadedModel:
    """Load one model; whatever cannot be served exactly is refused here.

    packs_whole   Llama-like models may be packed for the native forward, which needs a cache of their own dtype
    """
    path = sources.resolve(config.model)
    sources.check_files(path)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    hf_config = _read_config(path)
    check_config(hf_config.get_text_config())
    quantization = quantization_of(config.quantization, device, dtype)
    module = _load_weights(path, dtype if quantization is None else stored_dtype(hf_config)).to(device).eval()
    text_config = module.config.get_text_config()
    attention = check_model(module, text_config)
    self_test(text_config)
    vocab_size = int(module.get_output_embeddings().weight.shape[0])
    tokenizer = _load_tokenizer(path)
    longest = int(getattr(text_config, "max_position_embeddings", None) or 2**20)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidRequestError(
            f"max_model_len is {config.max_model_len}; {config.model} was made for at most {longest} tokens",
            param="max_model_len",
        )
    fast = _pack(module, attention, config, dtype, quantization, packs_whole)
    return LoadedModel(
        path=path,
        module=module,
        config=text_config,
        attention=attention,
        fast=fast,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(path, text_config, tokenizer),
        max_model_len=config.max_model_len or longest,
        vocab_size=vocab_size,
        dtype=dtype,
        device=device,
    )


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"transformers does not know the model in {path}: {error}") from error


def _load_weights(path: Path, dtype: torch.dtype) -> Any:
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that we can name them; they are fatal below
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ModelLoadError(f"transformers could not load {path}: {error}") from error
    mismatched = sorted(str(m) for m in info.get("mismatched_keys") or ())
    missing = sorted(info["missing_keys"])
    if missing and not mismatched:
        raise ModelLoadError(f"{path} lacks the weights of {len(missing)} tensors, among them {', '.join(missing[:5])}")
    if mismatched:
        raise ModelLoadError(f"{path} has weights of another shape than its config says: {', '.join(mismatched[:5])}")
    if info.get("unexpected_keys"):
        logger.warning("%s: %d tensors are not part of the model and were not used", path, len(info["unexpected_keys"]))
    return module


def _pack(
    module: Any,
    attention: AttentionProbe,
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: Quantization | None,
    packs_whole: bool,
) -> PackedLlama | None:
    """Lay the weights out for the kernels, in place or as what the native forward reads; say what they take."""
    longest = int(getattr(module.config.get_text_config(), "max_position_embeddings", None) or 2**20)
    num_positions = config.max_model_len or longest
    fast = pack_fast(module, attention, num_positions, dtype, quantization) if packs_whole else None
    if fast is None:
        pack_linears(module, dtype, quantization)
        finish(module, dtype)
    held = weights_held(module, fast)
    if quantization is not None and not any("codes" in kind for kind in held):
        raise UnsupportedModelError(
            f"quantization is {config.quantization!r}, but {config.model} has no linear layer of a width that is a "
            "multiple of 32, so nothing would be quantised"
        )
    logger.info("%s: weights take %s; quantization %s", config.model, describe_weights(held), config.quantization)
    if fast is not None:
        module.to("meta")  # the packed weights are the only copy
    return fast


def _load_tokenizer(path: Path) -> Any | None:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ModelLoadError(f"the tokenizer in {path} cannot be read: {error}") from error


def _eos_token_ids(path: Path, config: Any, tokenizer: Any | None) -> frozenset[int]:
    found: list[Any] = [config.eos_token_id, getattr(tokenizer, "eos_token_id", None)]
    if (path / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(i) for i in ids if i >= 0)
