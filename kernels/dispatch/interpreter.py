"""What Triton's interpreter gets wrong or does slowly, put right: it is our witness for the kernels' arithmetic.

Found in Triton 3.9: bfloat16 lives in 16-bit integers and `tl.dot` multiplies those integers; a conversion to bfloat16
cuts instead of rounding to nearest; every call of a device function looks the whole language over again (12 ms).
Knows Triton's interpreter and nothing of ours.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

logger = logging.getLogger(__name__)


def mend() -> None:
    """Replace the faulty pieces, once a process."""
    builder = getattr(interpreter, "InterpreterBuilder", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if builder is None or scope is None or not hasattr(builder, "cast_impl"):
        logger.warning("this version of Triton's interpreter is not known; bfloat16 kernels may be wrong in it")
        return
    # Checking every sum of integers for overflow doubles the time of all of them.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _mend_bfloat16(builder)
    _patch_language_once(scope)


def _mend_bfloat16(builder: Any) -> None:
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return cast(self, src, dst_type)
        wide = widened(src.data) if kinds[0] == tl.bfloat16 else src.data.astype(np.float32)
        if kinds[1] == tl.bfloat16:
            return interpreter.TensorHandle(rounded(wide), kinds[1])
        return cast(self, interpreter.TensorHandle(wide, tl.float32), dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, _as_float32(a), _as_float32(b), d, *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def _as_float32(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(widened(handle.data), tl.float32)


def widened(words: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 words (uint16)."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 words nearest to float32 values, ties to even; NaN stays NaN."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((words + np.uint32(0x7FFF) + (words >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _patch_language_once(scope: Any) -> None:
    """Have the language patched for good, instead of at every launch and every call of a device function."""
    patch = interpreter._patch_lang
    patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: scope()
