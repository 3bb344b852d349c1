"""Training: the loop over shards, its measures on the way, and the state that resumes it.

It knows recipes, supplies and optimisers by their faces. It does not know the command line or how a draft works.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draft_models import optim
from draft_models.batches import group, pad, predicting_rows
from draft_models.checkpoint import load_state, save_state
from draft_models.features import Sample
from draft_models.measure import agreements, tally
from draft_models.precision import products_in
from draft_models.recipes import UnrolledLoss
from draft_models.supply import Supply

logger = logging.getLogger("draft_models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a draft is trained.

    rows           predicting rows (answer tokens) in all, over every visit
    cooldown       share of the rows, the last ones, over which the rate falls
    batch_rows     rows of one optimiser step, padding included
    unroll, decay  steps of the training-time test and the weight of one against the one before
    every_seconds  between two measures on held-out text, each of which also saves
    dtype          of matrix products
    """

    rows: int
    batch_rows: int = 1024
    unroll: int = 3
    decay: float = 0.8
    muon_rate: float = 0.004
    adam_rate: float = 3e-4
    fc_scale: float = 1.0
    cooldown: float = 0.25
    clip: float = 1.0
    every_seconds: float = 240.0
    k: int = 5
    seed: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(slots=True)
class Progress:
    """Where a run stands; what is summed is summed over all processes."""

    step: int = 0
    rows: int = 0
    seconds: float = 0.0
    visits: dict[int, int] = field(default_factory=dict)


class Trainer:
    """One run in one folder: `state.pt` resumes it, `log.jsonl` is its curve, the rest is the checkpoint."""

    def __init__(self, recipe: Any, supply: Supply, heldout: Sequence[Sample], settings: Settings, out: Path) -> None:
        self.recipe, self.supply, self.heldout, self.settings, self.out = recipe, supply, heldout, settings, out
        self.accelerator = Accelerator()
        optimisers = optim.build(recipe, settings.muon_rate, settings.adam_rate, settings.fc_scale)
        loss = UnrolledLoss(recipe, settings.unroll, settings.decay)
        self.loss, *self.optimisers = self.accelerator.prepare(loss, *optimisers)
        self.mean = optim.RunningMean(recipe)
        self.progress = Progress()
        self._resume()

    def run(self, deadline: float | None = None) -> None:
        """Train until the rows are used up, the data are, or the clock (time.monotonic) passes `deadline`."""
        began, measured = time.monotonic() - self.progress.seconds, time.monotonic()
        losses: list[float] = []
        while self.progress.rows < self.settings.rows and (shard := self.supply.next_shard()) is not None:
            for batch in self._batches(shard):
                losses.append(self._step(batch))
                self.progress.seconds = time.monotonic() - began
                is_late = deadline is not None and time.monotonic() > deadline
                if is_late or self.progress.rows >= self.settings.rows:
                    self._report(losses)
                    return
            self.supply.visited(shard)
            if time.monotonic() - measured > self.settings.every_seconds:
                self._report(losses)
                losses, measured = [], time.monotonic()
        self._report(losses)

    def _batches(self, shard: int) -> list[list[Sample]]:
        """This process's batches of a shard, as many as every other process has."""
        mine = self.supply.samples(shard)[self.accelerator.process_index :: self.accelerator.num_processes]
        seed = self.settings.seed * 7919 + self.supply.visits.get(shard, 0) * 104729 + shard
        batches = list(group(mine, self.settings.batch_rows, seed))
        fewest = self.accelerator.gather(torch.tensor([len(batches)], device=self.accelerator.device)).min()
        return batches[: int(fewest)]

    def _step(self, batch: list[Sample]) -> float:
        share = self.progress.rows / self.settings.rows
        optim.set_rate(self.optimisers, optim.rate_factor(self.progress.step, share, cooldown=self.settings.cooldown))
        with self._products():
            loss = self.loss(pad(batch, self.accelerator.device, self.settings.dtype))
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.loss.parameters(), self.settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.mean.update(self.recipe)
        self.progress.step += 1
        self.progress.rows += sum(map(predicting_rows, batch)) * self.accelerator.num_processes
        return float(loss.detach())

    def _products(self) -> torch.autocast:
        return products_in(self.settings.dtype, self.accelerator.device)

    def _report(self, losses: Sequence[float]) -> None:
        """Measure the running mean on held-out text, print, log, save."""
        if not self.accelerator.is_main_process:
            return
        raw = {name: value.clone() for name, value in self.recipe.state_dict().items()}
        self.recipe.load_state_dict(self.mean.values)
        with self._products():
            found = tally(agreements(self.recipe, self.heldout, self.settings.k), self.settings.k)
        self.out.mkdir(parents=True, exist_ok=True)
        self.recipe.save(self.out)
        self.recipe.load_state_dict(raw)
        self._save_state()
        line = {
            "rows": self.progress.rows,
            "distinct_shards": len(self.supply.visits),
            "seconds": round(self.progress.seconds, 1),
            "loss": round(sum(losses) / len(losses), 4) if losses else None,
            "mean_acceptance_length": round(found.mean_length, 4),
            "conditional": [round(c, 4) for c in found.conditional()],
        }
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        logger.info("%s", self._sentence(line))

    def _sentence(self, line: dict[str, Any]) -> str:
        done, whole = self.progress.rows, self.settings.rows
        left = self.progress.seconds * (whole - done) / max(done, 1)
        speed = done / max(self.progress.seconds, 1e-9)
        return (
            f"{done:,} of {whole:,} rows ({100 * done / whole:.1f} %), loss {line['loss']}, "
            f"held-out mean acceptance length at k = {self.settings.k}: {line['mean_acceptance_length']:.3f}, "
            f"by position {line['conditional']}, {speed:.0f} rows/s, about {left / 60:.0f} min left"
        )

    def _save_state(self) -> None:
        self.progress.visits = dict(self.supply.visits)
        save_state(
            self.out / "state.pt",
            {
                "recipe": self.recipe.state_dict(),
                "mean": self.mean.state(),
                "optimisers": [o.state_dict() for o in self.optimisers],
                "progress": {n: getattr(self.progress, n) for n in Progress.__dataclass_fields__},
            },
        )

    def _resume(self) -> None:
        state = load_state(self.out / "state.pt")
        if state is None:
            return
        self.recipe.load_state_dict(state["recipe"])
        self.mean.restore(state["mean"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            groups = optimiser.state_dict()["param_groups"]  # rates are those of this run
            optimiser.load_state_dict({"state": saved["state"], "param_groups": groups})
        self.progress = Progress(**state["progress"])
        self.supply.visits = dict(self.progress.visits)
        logger.info("resuming at %d rows", self.progress.rows)
