"""specdec: speculative decoding that says exactly what the target would have said.

The public names, imported when first used, so that `import specdec` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.config import SpeculativeConfig
    from specdec.errors import (
        ContextLengthError,
        EngineDeadError,
        InvalidRequestError,
        ModelLoadError,
        RequestFailedError,
        SpecdecError,
        UnsupportedModelError,
    )
    from specdec.llm import LLM, generate
    from specdec.logprobs import TokenLogprob
    from specdec.outputs import CompletionOutput, RequestOutput
    from specdec.sampling_params import SamplingParams, SpeculativeParams
    from specdec.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "CompletionOutput": "specdec.outputs",
    "ContextLengthError": "specdec.errors",
    "EngineDeadError": "specdec.errors",
    "InvalidRequestError": "specdec.errors",
    "LLM": "specdec.llm",
    "ModelLoadError": "specdec.errors",
    "RequestFailedError": "specdec.errors",
    "RequestOutput": "specdec.outputs",
    "SamplingParams": "specdec.sampling_params",
    "SpecdecError": "specdec.errors",
    "SpeculativeConfig": "specdec.config",
    "SpeculativeParams": "specdec.sampling_params",
    "StructuredOutputsParams": "specdec.structured_outputs",
    "TokenLogprob": "specdec.logprobs",
    "UnsupportedModelError": "specdec.errors",
    "generate": "specdec.llm",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ContextLengthError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelLoadError",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "SpecdecError",
    "SpeculativeConfig",
    "SpeculativeParams",
    "StructuredOutputsParams",
    "TokenLogprob",
    "UnsupportedModelError",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
