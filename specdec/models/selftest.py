"""The self-test of the load gate: the same family at a toy size, packed and chunked, against eager.

It knows what a correct bridge gives: the logits of transformers' own eager attention, whoever shares
the forward and however the prompt is cut. A family that fails is refused; a passed one is remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.errors import UnsupportedModelError
from specdec.kernels import native
from specdec.kernels.llama_forward import PackedLlama
from specdec.models import sources
from specdec.models.attention import IMPLEMENTATION, AttentionProbe
from specdec.models.fast_llama import pack_fast
from specdec.models.forward_batch import Segment
from specdec.models.gate import check_model
from specdec.models.loaded import LoadedModel
from specdec.models.runner import ModelRunner
from specdec.models.shrink import VOCAB_SIZE, shrink

logger = logging.getLogger("specdec")

TOLERANCE = 1e-4
_BLOCK_SIZE = 4
_TABLES = ((2, 5, 0, 7, 9, 11), (10, 3, 8, 1))  # two requests, blocks in no order
_LENGTHS = (23, 14)
_CUTS = ((0, 9, 12, 22, 23), (0, 3, 4, 12, 14))  # chunk edges on, before and behind block edges


def self_test(config: Any) -> None:
    """Refuse a family whose packed, chunked forward differs from eager by more than 1e-4.

    Takes a fraction of a second, once for a family, its shape of config and the versions at hand.
    """
    small = shrink(config)
    marker = _marker(small)
    if marker.is_file():
        return
    try:
        difference = measure(small)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{config.model_type} could not be tried at a small size ({type(error).__name__}: {error}), "
            "so nothing shows that the engine computes it rightly"
        ) from error
    if not difference < TOLERANCE:
        raise UnsupportedModelError(
            f"{config.model_type} differs from transformers' eager attention by {difference:.1e} when requests share "
            f"a forward and prompts are cut (at most {TOLERANCE:.0e} is rounding); it would be served wrongly"
        )
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:  # a cache that cannot be written costs the next start a moment
        logger.info("the self-test's result could not be kept: %s", error)


def _marker(config: Any) -> Path:
    facts = json.dumps(
        [config.to_dict(), transformers.__version__, torch.__version__, native.enabled(), _sources()],
        sort_keys=True,
        default=str,
    )
    return sources.cache_directory() / "selftest" / hashlib.sha256(facts.encode()).hexdigest()[:24]


def _sources() -> str:
    """The code whose rightness is being remembered."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [*sorted(here.glob("*.py")), *sorted(here.parent.glob("kernels/paged_attention/*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@torch.inference_mode()
def measure(small: Any) -> float:
    """The largest difference of any logit, relative to the largest logit where that is above one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        _move_norms(module)
        prompts = [torch.randint(0, VOCAB_SIZE, (n,)).tolist() for n in _LENGTHS]
    module.set_attn_implementation("eager")
    expected = [module(torch.tensor([p]), use_cache=False).logits[0] for p in prompts]
    module.set_attn_implementation(IMPLEMENTATION)
    attention = check_model(module, small)
    scale = max(1.0, *(float(e.abs().max()) for e in expected))
    worst = 0.0
    for fast in (None, pack_fast(module, attention, 256)):
        got = _packed(_loaded(module, small, attention, fast), prompts)
        worst = max(worst, *(float((g - e).abs().max()) / scale for g, e in zip(got, expected, strict=True)))
        if worst != worst:  # NaN compares with nothing, so it must not be lost in a maximum
            break
    return worst


def _loaded(module: Any, config: Any, attention: AttentionProbe, fast: PackedLlama | None) -> LoadedModel:
    return LoadedModel(
        path=Path(), module=module, config=config, attention=attention, fast=fast, tokenizer=None,
        eos_token_ids=frozenset(), max_model_len=256, vocab_size=VOCAB_SIZE, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def _move_norms(module: torch.nn.Module) -> None:
    """Norms, biases and sinks start at one or zero: move them, so that a lost one shows."""
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))


def _packed(model: LoadedModel, prompts: list[list[int]]) -> list[Tensor]:
    """Both prompts through the paged cache, a chunk of each in every forward; unused slots hold NaN."""
    runner = ModelRunner(model, 12, _BLOCK_SIZE)
    for tensor in [*runner.cache.keys, *runner.cache.values]:
        tensor.fill_(float("nan"))
    rows: list[list[Tensor]] = [[], []]
    for step in range(len(_CUTS[0]) - 1):
        segments = []
        for prompt, cuts, table in zip(prompts, _CUTS, _TABLES, strict=True):
            chunk = prompt[cuts[step] : cuts[step + 1]]
            segments.append(Segment(chunk, cuts[step], table, len(chunk)))
        scores = runner.forward(runner.pack(segments))
        for row, part in zip(rows, scores.split([s.num_logits for s in segments]), strict=True):
            row.append(part)
    return [torch.cat(row) for row in rows]
