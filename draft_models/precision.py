"""Precision: the dtype of matrix products while a draft is trained; it knows devices and nothing of drafts.

Weights, optimiser states, softmax and sums stay in float32 whatever is chosen.
"""

from __future__ import annotations

import torch

CHOICES = ("auto", "fp32", "bf16")


def choose(said: str, device: torch.device) -> torch.dtype:
    """What a choice means on a device: "auto" is bfloat16 where the hardware multiplies matrices in it."""
    if said not in CHOICES:
        raise ValueError(f"precision is {said!r}; expected one of {', '.join(CHOICES)}")
    is_bf16 = has_bf16_products(device) if said == "auto" else said == "bf16"
    return torch.bfloat16 if is_bf16 else torch.float32


def has_bf16_products(device: torch.device) -> bool:
    """Whether bfloat16 products are an instruction: AMX or AVX-512 BF16 on a CPU, what torch says of a GPU."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def products_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which matrix products are taken in `dtype`; float32 changes nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
