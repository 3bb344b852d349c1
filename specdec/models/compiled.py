"""Compiled layers: torch.compile over the decoder layers of a CPU model that our kernels do not run whole.

It knows modules, torch's compiler and how many tokens a graph is made for; it does not know what a layer computes.
Attention and packed linear layers stay the kernels they are, opaque to the compiler, and what lies between them is
fused. A token then has the same bits in any company, as without it, but not the bits it has without it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.fx.experimental import _config as shapes

from specdec.kernels import native
from specdec.models.forward_batch import Segment
from specdec.models.runner import ModelRunner
from specdec.models.streams import decoder_layers

logger = logging.getLogger("specdec")

WARM_UP_TOKENS = (37, 1)
"""A kind of layer gets one graph, for any number of tokens: a second one for a single token would round differently.
It is made at a number that is no other dimension, or the compiler would take the two for one."""

# What is fused is small: a second team of threads would cost more than it saves, and fight the first for the cores.
_COMPILER: dict[str, Any] = {"backend": "inductor", "dynamic": True, "options": {"cpp.threads": 1}}


def compile_layers(runner: ModelRunner) -> bool:
    """Compile a model's decoder layers before its first request; False where nothing is compiled.

    Hooks on layers must be there already. It writes into cache blocks nobody holds yet. A compiler that fails, or whose
    layers compute something else, costs a line in the log, and the layers run as they were.
    """
    if runner.model.device.type != "cpu" or not native.enabled():
        return False
    if runner.model.fast is not None:
        logger.info("%s: our kernels run it whole; nothing is left to compile", runner.model.path)
        return False
    began = time.perf_counter()
    expected = _scores(runner)
    layers = nn.ModuleList()
    try:
        layers = decoder_layers(runner.model)
        for layer in layers:
            layer.compile(**_COMPILER)
        with shapes.patch(backed_size_oblivious=True), dynamo.patch(specialize_float=True):  # type: ignore[attr-defined]
            found = _scores(runner)
        _compare(found, expected)
    except Exception as error:
        for layer in layers:
            layer._compiled_call_impl = None
        reason = " ".join(str(error).split("\n")[:2])  # the compiler says which backend, then why
        logger.warning("decoder layers are not compiled (slower): %s: %s", type(error).__name__, reason)
        return False
    runner.is_compiled = True
    logger.info("%s: compiled %d layers in %.1f s", runner.model.path, len(layers), time.perf_counter() - began)
    return True


def _scores(runner: ModelRunner) -> Tensor:
    """The scores behind every warm-up: [2, V]."""
    size = runner.cache.block_size
    segments = [Segment([0] * num, 0, range(-(-num // size)), 1) for num in WARM_UP_TOKENS]
    return torch.cat([runner.forward(runner.pack([segment])) for segment in segments])


def _compare(found: Tensor, expected: Tensor) -> None:
    """Refuse layers that compute something else; what fusing rounds otherwise is far below."""
    tolerance = 0.1 if expected.dtype in (torch.bfloat16, torch.float16) else 1e-3
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference < tolerance:
        raise ArithmeticError(f"compiled layers differ from the others by {difference:.1e} of the largest score")
