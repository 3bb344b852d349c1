"""Recipes: the two kinds of draft that are trained here, behind one face.

A recipe yields, for a batch, what its draft says at every unrolled step; training, measuring and evaluation
need no more. It knows its own module and how it is saved; it does not know data files or optimisers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draft_models import start
from draft_models.checkpoint import HeadFacts, load_head, save_head
from draft_models.head import Eagle3Head, Rows
from draft_models.loss import StepView, TargetEnd, divergence, target_law, view
from draft_models.target import Target


class Recipe(Protocol):
    """What training asks of a draft."""

    end: TargetEnd
    draft_ids: Tensor

    def views(self, rows: Rows, steps: int) -> Iterator[StepView]:
        """The first `steps` unrolled steps of a batch whose features are those of `stored` layers."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint an engine can load."""


class Eagle3(nn.Module):
    """A feature head (EAGLE-3)."""

    def __init__(self, head: Eagle3Head, facts: HeadFacts, end: TargetEnd, stored: tuple[int, ...]) -> None:
        super().__init__()
        self.head, self.facts, self.end = head, facts, end
        self.draft_ids = end.draft_ids
        self.picks = [stored.index(i) for i in facts.feature_layer_ids]

    @classmethod
    def fresh(cls, target: Target, draft_ids: Tensor, layers: tuple[int, ...], stored: tuple[int, ...]) -> Eagle3:
        """A head that starts from the target."""
        head = Eagle3Head(target.head_config(len(draft_ids), len(layers)))
        start.from_target(head, target, draft_ids)
        facts = HeadFacts(layers, target.name, target.base, draft_ids)
        return cls(head, facts, target.end(draft_ids), stored)

    @classmethod
    def read(cls, folder: Path, target: Target, stored: tuple[int, ...]) -> Eagle3:
        """A head that was saved; refused where it was trained for other weights or has another shape."""
        head, facts = load_head(folder)
        if facts.base != target.base:
            raise ValueError(
                f"{folder} was trained for the weights {facts.base[:12]} of {facts.target}; "
                f"this target's are {target.base[:12]}"
            )
        expected = asdict(target.head_config(len(facts.draft_ids), len(facts.feature_layer_ids)))
        for name, found in asdict(head.config).items():
            if found != expected[name]:
                raise ValueError(f"{folder}: {name} is {found}; a head of {target.name} has {expected[name]}")
        return cls(head, facts, target.end(facts.draft_ids), stored)

    def views(self, rows: Rows, steps: int) -> Iterator[StepView]:
        """The head's unrolled steps."""
        width = self.head.config.hidden_size
        stored = rows.features.unflatten(-1, (-1, width))
        law = target_law(rows, self.end, stored[..., -1, :])
        mine = replace(rows, features=stored[..., self.picks, :].flatten(-2))
        for step, hidden in enumerate(self.head(mine, self.end.embedding, steps)):
            valid = rows.valid(step)
            if not bool(valid.any()):
                return
            yield view(rows, self.end, step, self.head.norm(hidden[valid]), self.head.lm_head.weight, law)

    def save(self, folder: Path) -> None:
        """Write the EAGLE-3 layout in bf16."""
        save_head(folder, self.head, self.facts)


class TinyLlama(nn.Module):
    """An independent Llama of a few layers over the target's own tokenizer and (frozen) embedding.

    It needs no unrolling in training: fed with the true text, what it says at step s is what it says s places on.
    """

    def __init__(self, model: Any, tokenizer: Any, end: TargetEnd) -> None:
        super().__init__()
        self.model, self.tokenizer, self.end = model, tokenizer, end
        self.draft_ids = end.draft_ids

    @classmethod
    def fresh(cls, target: Target, num_layers: int) -> TinyLlama:
        """New layers between the target's own embedding, final norm and head.

        The target's layers are no start for it: stacked out of their order they give a loss of 60 (measured).
        """
        config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": num_layers})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.get_input_embeddings().weight.data.copy_(target.embedding)
        model.get_decoder().norm.load_state_dict(target.final_norm.state_dict())
        return cls._frozen(model, target)

    @classmethod
    def read(cls, folder: Path, target: Target) -> TinyLlama:
        """A draft that was saved."""
        return cls._frozen(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), target)

    @classmethod
    def _frozen(cls, model: Any, target: Target) -> TinyLlama:
        model.get_input_embeddings().weight.requires_grad_(False)
        model.get_output_embeddings().weight.requires_grad_(False)
        return cls(model, target.tokenizer, target.end(torch.arange(target.embedding.shape[0])))

    def views(self, rows: Rows, steps: int) -> Iterator[StepView]:
        """The same scores, seen from s places earlier."""
        width = self.end.embedding.shape[1]
        law = target_law(rows, self.end, rows.features[..., -width:])
        hidden = self.model.get_decoder()(input_ids=rows.ids, use_cache=False).last_hidden_state
        inside = rows.valid(0)
        picked = hidden.gather(1, rows.index(1)[..., None].expand(-1, -1, width))[inside]
        head = self.model.get_output_embeddings().weight
        places = torch.full(inside.shape, -1, device=inside.device)
        places[inside] = torch.arange(len(picked), device=inside.device)
        for step in range(steps):
            valid = rows.valid(step)
            if not bool(valid.any()):
                return
            yield view(rows, self.end, step, picked[places.roll(-step, dims=1)[valid]], head, law)

    def save(self, folder: Path) -> None:
        """Write an ordinary checkpoint in bf16, with the tokenizer."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.model.to(torch.float32)
        self.tokenizer.save_pretrained(folder)


class UnrolledLoss(nn.Module):
    """Sum over steps of decay**step times the divergence: the module a launcher may wrap for many devices."""

    def __init__(self, recipe: Any, steps: int, decay: float) -> None:
        super().__init__()
        self.recipe, self.steps, self.decay = recipe, steps, decay

    def forward(self, rows: Rows) -> Tensor:
        """[]"""
        return divergence(list(self.recipe.views(rows, self.steps)), self.decay)
