"""LoadedModel: what loading hands on, a value; it knows modules and facts about them, and does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.kernels.llama_forward import PackedLlama
from specdec.models.attention import AttentionProbe


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be given a cache.

    module          the transformers model, in eval mode
    attention       its attention modules and what each stores for a token
    fast            the same weights for the native forward; then the module holds none itself
    tokenizer       None where the directory has none
    eos_token_ids   union of config, generation config and tokenizer
    max_model_len   the longest sequence the model was made for
    """

    path: Path
    module: nn.Module
    config: Any
    attention: AttentionProbe
    fast: PackedLlama | None
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
