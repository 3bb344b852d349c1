"""Target: the frozen model a draft is trained for, as transformers loads it.

It knows where the target lies, its shapes and its hash. It does not train, and it does not serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_models.corpus import file_hash
from draft_models.head import HeadConfig
from draft_models.loss import TargetEnd
from specdec.models import sources


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target.

    name   what the user said; an absolute path keeps its last part only
    base   sha256 over its weight files
    """

    name: str
    base: str
    model: Any
    tokenizer: Any

    @property
    def config(self) -> Any:
        """The text config of the model."""
        return self.model.config.get_text_config()

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the head."""
        module: nn.Module = self.model.get_decoder().norm
        return module

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows [len(ids), H] of the output head."""
        weight: Tensor = self.model.get_output_embeddings().weight.detach()
        return weight[ids.to(weight.device)].clone()

    def end(self, draft_ids: Tensor) -> TargetEnd:
        """The target's law over a draft vocabulary."""
        norm: Any = self.final_norm
        ids = draft_ids.to(self.embedding.device)
        return TargetEnd(self.embedding, norm.weight.detach(), self.config.rms_norm_eps, self.head_rows(ids), ids)

    def head_config(self, draft_vocab_size: int, num_features: int) -> HeadConfig:
        """A head of the target's own width."""
        config = self.config
        rope = getattr(config, "rope_parameters", None) or {}
        heads = config.num_attention_heads
        return HeadConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            vocab_size=self.embedding.shape[0],
            draft_vocab_size=draft_vocab_size,
            num_features=num_features,
        )


def load_target(name: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Target:
    """Load a target in a dtype from an alias, a directory, a GGUF file or a hub id."""
    path = sources.resolve(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)
    for part in ("layers", "norm"):
        if not hasattr(model.get_decoder(), part):
            raise ValueError(
                f"{name}: heads are trained for decoders with `layers` and a final `norm`; it has no `{part}`"
            )
    said = name if name in sources.ALIASES else Path(name).name
    return Target(said, weights_hash(path), model, AutoTokenizer.from_pretrained(path))


def weights_hash(path: Path) -> str:
    """sha256 of the only weight file, or of the hashes of several in order of name."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} holds no .safetensors file; drafts are bound to their target by its hash")
    hashes = [file_hash(file) for file in files]
    if len(hashes) == 1:
        return hashes[0]
    import hashlib

    return hashlib.sha256("".join(hashes).encode()).hexdigest()
