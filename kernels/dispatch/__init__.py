"""Which engine an op runs on: Triton on a GPU, the CPU path elsewhere, or what SPECDEC_KERNELS asks for.

Knows the environment and the device of a tensor. It does not know ops: each door asks `wants_triton` and falls back to
its native CPU code or its plain-PyTorch twin.

SPECDEC_KERNELS     unset or "auto"   Triton where tensors are on CUDA or HIP; native code, or else the twins, on a CPU
                    "reference"       the twins, everywhere
                    "triton"          Triton, and a sentence instead of a slower path where it cannot run
                    "interpret"       Triton's interpreter, on any device: slow, for tests; the other ops use twins

SPECDEC_AMX (see `native.has_tiles`) chooses inside native code.

Triton decides while it is imported whether kernels are interpreted, so the last value must be set before Python starts.
"""

import functools
import importlib
import importlib.util
import logging
import os
import sys
from typing import Literal, get_args

from torch import Tensor

logger = logging.getLogger(__name__)

Mode = Literal["auto", "reference", "triton", "interpret"]


def mode() -> Mode:
    """Return what SPECDEC_KERNELS asks for; ValueError names a value that is not known."""
    chosen = os.environ.get("SPECDEC_KERNELS") or "auto"
    for known in get_args(Mode):
        if chosen == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"SPECDEC_KERNELS is {chosen!r}; it must be one of {', '.join(get_args(Mode))}")


def wants_triton(x: Tensor, refusal: str | None = None) -> bool:
    """Say whether a Triton engine should compute on `x`.

    refusal   why the engine cannot compute these arguments, as a sentence; None where it can

    ValueError where SPECDEC_KERNELS insists on Triton and it cannot run. In mode "auto" a refused call on a GPU is
    computed by the twin, and said once a reason.
    """
    chosen = mode()
    if chosen == "reference" or (chosen == "auto" and not x.is_cuda):
        return False
    if chosen == "triton" and not x.is_cuda:
        raise ValueError(
            f"SPECDEC_KERNELS is 'triton', but a tensor is on {x.device}; Triton needs a CUDA or HIP device "
            "(SPECDEC_KERNELS=interpret runs its kernels on a CPU, slowly)"
        )
    if refusal is None and not _has_triton():
        refusal = "the package triton is not installed"
    if refusal is None:
        return True
    if chosen != "auto":
        raise ValueError(f"SPECDEC_KERNELS is {chosen!r}, but {refusal}")
    _say_once(refusal)
    return False


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=64)
def _say_once(refusal: str) -> None:
    logger.warning("plain PyTorch is used instead of a Triton kernel (slower): %s", refusal)


def _prepare_interpreter() -> None:
    """Have Triton decorate kernels for its interpreter, and refuse to run where it is too late for that."""
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise ImportError(
            "SPECDEC_KERNELS is 'interpret', but triton was imported before specdec's kernels; "
            "set TRITON_INTERPRET=1 too, or import specdec.kernels first"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    if _has_triton():
        importlib.import_module("specdec.kernels.dispatch.interpreter").mend()


if mode() == "interpret":
    _prepare_interpreter()
