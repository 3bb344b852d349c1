"""Quantisation: what the option means, where it is refused, and what the weights then take.

It knows names, devices and packed weights; the codes themselves are the kernels' business.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from specdec.errors import InvalidRequestError
from specdec.kernels import native
from specdec.kernels.linear import Quantization
from specdec.kernels.llama_forward import PackedLlama
from specdec.models.packed import PACKABLE, PackedLinearModule

_MEANINGS: dict[str, Quantization | None] = {
    "none": None,
    "int4": Quantization(4),
    "int8": Quantization(8),
    "int4-a8": Quantization(4, rounds_inputs=True),
    "int8-a8": Quantization(8, rounds_inputs=True),
}


def quantization_of(name: str, device: torch.device, dtype: torch.dtype) -> Quantization | None:
    """What the option asks for; refused where no kernel of ours does it."""
    meant = _MEANINGS[name]
    if meant is None:
        return None
    problem = (
        f"device is {device}, and only CPU kernels read codes" if device.type != "cpu"
        else f"dtype is {dtype}, and kernels compute in float32 or bfloat16" if dtype not in PACKABLE
        else "the CPU kernels are off (--compile off) or not built here (no C++ compiler)" if not native.enabled()
        else None
    )  # fmt: skip
    if problem is not None:
        raise InvalidRequestError(f"quantization is {name!r}; {problem}", param="quantization")
    return meant


def stored_dtype(config: Any) -> torch.dtype:
    """The dtype to read weights in before they become codes: nothing of the checkpoint is lost on the way."""
    dtype = getattr(config, "dtype", None)
    return torch.bfloat16 if dtype in (torch.bfloat16, "bfloat16") else torch.float32


def weights_held(module: nn.Module, fast: PackedLlama | None) -> Counter[str]:
    """Bytes of a loaded model by how they are held."""
    held: Counter[str] = Counter()
    if fast is not None:
        for kind, num_bytes in fast.held:
            held[kind] += num_bytes
        return held
    for parameter in module.parameters():
        held[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    for layer in module.modules():
        if isinstance(layer, PackedLinearModule):
            held[layer.packed.kind] += layer.packed.data.nbytes
    return held


def describe_weights(held: Counter[str]) -> str:
    """The same in a phrase for the log.

    >>> describe_weights(Counter({"4-bit codes": 66_355_200, "float32": 5_000_000}))
    '71 MB (66 MB 4-bit codes, 5 MB float32)'
    """
    parts = ", ".join(f"{num_bytes / 1e6:.0f} MB {kind}" for kind, num_bytes in held.most_common())
    return f"{sum(held.values()) / 1e6:.0f} MB ({parts})"


def finish(module: nn.Module, dtype: torch.dtype) -> None:
    """Bring the parameters that are not held as codes to the dtype the model computes in; buffers stay."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
