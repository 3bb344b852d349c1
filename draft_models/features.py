"""Features: what the target thinks at every token of an example, computed once, streamed or kept on disk.

It knows the target's layers and how a batch is padded. It does not know what a head does with features.
Entry feature i is the residual stream that enters decoder layer i; i = number of layers is what enters the
final norm (fact sheet 3.1, ENTRY convention).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draft_models.corpus import Example


@dataclass(frozen=True, slots=True)
class Sample:
    """An example with its features.

    ids        [T] int64
    features   [T, F * width]; the columns of entry layer j of `layers` are j * width ... (j + 1) * width
    """

    ids: Tensor
    answer_start: int
    features: Tensor


class FeatureTap:
    """Captures entry features of a transformers model while it runs."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.body: Any = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        num_layers = len(self.body.layers)
        bad = [i for i in layers if not 0 <= i <= num_layers]
        if bad:
            raise ValueError(
                f"feature layers are {list(layers)}; entry ids of this target are 0..{num_layers}, got {bad}"
            )
        self._seen: dict[int, Tensor] = {}
        for i in set(layers):
            place = self.body.norm if i == num_layers else self.body.layers[i]
            place.register_forward_pre_hook(self._keep(i), with_kwargs=True)

    def _keep(self, i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[i] = args[0] if args else kwargs["hidden_states"]

        return hook

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Run ids [B, T] (padded on the right) and return features [B, T, F * width]."""
        self.body(input_ids=ids, use_cache=False)
        return torch.cat([self._seen[i] for i in self.layers], dim=-1)


def batches_by_tokens(examples: Sequence[Example], most: int) -> Iterator[list[Example]]:
    """Group neighbours of similar length so that a padded batch holds at most `most` tokens."""
    ordered = sorted(examples, key=lambda e: len(e.ids))
    batch: list[Example] = []
    for example in ordered:
        if batch and (len(batch) + 1) * len(example.ids) > most:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def compute(tap: FeatureTap, examples: Sequence[Example], *, most: int = 1024, device: str = "cpu") -> Iterator[Sample]:
    """Samples of the examples, in order of length."""
    for batch in batches_by_tokens(examples, most):
        longest = max(len(e.ids) for e in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, example in enumerate(batch):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
        features = tap(ids.to(device))
        for row, example in enumerate(batch):
            length = len(example.ids)
            yield Sample(
                ids[row, :length].clone(), example.answer_start, features[row, :length].to(torch.bfloat16).cpu()
            )


class Shards:
    """A folder of computed samples that may grow while it is read; bf16, a few hundred samples a gigabyte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[Path]:
        """The finished shards, oldest first."""
        return sorted(self.folder.glob("shard-*.safetensors"))

    def path(self, index: int) -> Path:
        """Where a shard lies or will lie."""
        return self.folder / f"shard-{index:05d}.safetensors"

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Write one shard; it appears under its name only when it is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            "ids": torch.cat([s.ids for s in samples]),
            "features": torch.cat([s.features for s in samples]),
            "lengths": torch.tensor([len(s.ids) for s in samples]),
            "answer_starts": torch.tensor([s.answer_start for s in samples]),
        }
        final = self.path(index)
        partial = final.with_suffix(f".{os.getpid()}.partial")
        save_file(tensors, partial)
        partial.rename(final)

    @staticmethod
    def read(path: Path, columns: slice | None = None) -> list[Sample]:
        """The samples of one shard; `columns` keeps some of the feature columns."""
        with safe_open(path, framework="pt") as file:
            ids, lengths = file.get_tensor("ids"), file.get_tensor("lengths").tolist()
            starts, features = file.get_tensor("answer_starts").tolist(), file.get_tensor("features")
        if columns is not None:
            features = features[:, columns]
        ends = list(itertools.accumulate(lengths))
        return [
            Sample(ids[end - n : end], start, features[end - n : end])
            for n, end, start in zip(lengths, ends, starts, strict=True)
        ]


def describe(folder: Path, layers: Sequence[int], **facts: Any) -> None:
    """Write down what a folder of shards holds; a folder of other facts is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "features.json"
    wanted = {"feature_layer_ids": list(layers), "feature_convention": "entry", **facts}
    if path.exists() and json.loads(path.read_text()) != wanted:
        raise ValueError(f"{folder} holds features of other data or layers ({path.read_text()}); give another folder")
    path.write_text(json.dumps(wanted))
