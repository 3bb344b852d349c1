"""A target that recites: the token behind position p is story[p + 1], whatever was asked.

With it a test writes the output it wants to see on the wire, and steps take microseconds. Prompts
are prefixes of the story; where they end, the recitation begins.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.batch import Drafts, Plan, Row
from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig
from specdec.controller import FixedLength
from specdec.engine import Engine
from specdec.models.forward_batch import Segment
from specdec.proposers.base import NoDrafts, Proposer
from specdec.scheduler import Scheduler
from tests.toys import VOCAB_SIZE, byte_tokenizer

EOS = 257


_tokenizer = functools.cache(byte_tokenizer)


@dataclass
class ScriptedModel:
    """The few facts the engine and the server ask a loaded model."""

    tokenizer: Any = field(default_factory=_tokenizer)
    eos_token_ids: frozenset[int] = frozenset({EOS})
    vocab_size: int = VOCAB_SIZE


class Reciter:
    """Stands where a ModelRunner stands.

    seconds      how long a step takes
    before       called before every step; what it raises is a fault of the step
    poison       positions whose scores are not finite
    """

    def __init__(self, story: Sequence[int], seconds: float = 0.0) -> None:
        self.story = list(story)
        self.seconds = seconds
        self.before: Callable[[], None] = lambda: None
        self.poison: set[int] = set()
        self.model = ScriptedModel()
        self.features = None
        self.num_forwards = 0

    def next_token(self, position: int) -> int:
        """What follows the token at `position`."""
        return self.story[(position + 1) % len(self.story)]

    def pack(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Nothing to lay out."""
        return segments

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Certain scores, [L, V]."""
        self.num_forwards += 1
        self.before()
        if self.seconds:
            time.sleep(self.seconds)
        places = [s.start + i for s in segments for i in range(len(s.token_ids) - s.num_logits, len(s.token_ids))]
        logits = torch.zeros(len(places), VOCAB_SIZE)
        for row, position in enumerate(places):
            logits[row, self.next_token(position)] = 1000.0
            if position in self.poison:
                logits[row] = float("nan")
        return logits


class Prophet(NoDrafts):
    """Drafts what the reciter will say, and every `wrong_every`-th draft something else."""

    name = "prophet"

    max_draft_position = None

    def __init__(self, reciter: Reciter, wrong_every: int = 0) -> None:
        self.reciter = reciter
        self.wrong_every = wrong_every

    def propose(self, plan: Plan) -> Drafts:
        """Offer as many as there is room for."""
        return Drafts.of((self._offer(row) for row in plan), self.name)

    def _offer(self, row: Row) -> tuple[int, ...]:
        places = range(row.end - 1, row.end - 1 + row.max_drafts)
        right = [self.reciter.next_token(place) for place in places]
        if not self.wrong_every:
            return tuple(right)
        return tuple((t + 1) % 256 if i % self.wrong_every == self.wrong_every - 1 else t for i, t in enumerate(right))


def scripted_engine(
    story: str | Sequence[int] = "the quick brown fox jumps over the lazy dog. " * 8,
    *,
    seconds: float = 0.0,
    num_drafts: int = 0,
    wrong_every: int = 0,
    max_num_seqs: int = 16,
    max_model_len: int = 512,
    num_blocks: int = 1024,
) -> Engine:
    """An engine around a reciter; num_drafts > 0 adds a prophet."""
    ids = _tokenizer()(story)["input_ids"] if isinstance(story, str) else story
    reciter = Reciter(ids, seconds)
    proposer: Proposer = Prophet(reciter, wrong_every) if num_drafts else NoDrafts()
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512)
    return Engine(
        reciter,  # type: ignore[arg-type]
        proposer,
        FixedLength(num_drafts, proposer.max_draft_position),
        Scheduler(config, BlockPool(num_blocks, 16)),
        max_model_len=max_model_len,
    )
