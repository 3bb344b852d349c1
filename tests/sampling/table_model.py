"""A language model that is a table: its scores depend on position and last token, and cost nothing.

Engines built on it are the real ones, so whole requests can be sampled by the ten thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from evals.random_parameters import Told
from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig
from specdec.controller import FixedLength
from specdec.engine import Engine
from specdec.models.forward_batch import ForwardBatch, Segment
from specdec.models.runner import ModelRunner
from specdec.proposers.base import NoDrafts, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Scheduler

BLOCK_SIZE = 4
PERIOD = 16


class TableModel:
    """Looks like a ModelRunner; float64.

    table   [PERIOD, V, V]   scores of the next token by position and last token
    """

    def __init__(self, table: Tensor, *, eos: frozenset[int] = frozenset(), tokenizer: Any = None) -> None:
        self.table = table
        self.features = None
        self.model = SimpleNamespace(
            vocab_size=table.shape[-1], eos_token_ids=eos, max_model_len=2**20, tokenizer=tokenizer
        )

    @classmethod
    def random(cls, seed: int, vocab_size: int = 8, scale: float = 1.2, **options: Any) -> TableModel:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(PERIOD, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        return cls(scale * table, **options)

    def near(self, seed: int, distance: float) -> TableModel:
        """Another model that mostly agrees."""
        other = TableModel.random(seed, self.table.shape[-1])
        return TableModel(self.table + distance * other.table)

    def scores(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """What the model says behind these tokens."""
        tokens = [*prompt, *output]
        return cast("list[float]", self.table[(len(tokens) - 1) % PERIOD, tokens[-1]].tolist())

    def pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        return ForwardBatch.pack(segments, BLOCK_SIZE, torch.device("cpu"))

    def forward(self, batch: ForwardBatch) -> Tensor:
        places = batch.logits_indices
        return self.table[batch.positions[places] % PERIOD, batch.token_ids[places]]


class Digits:
    """A tokenizer whose words are digits: "31" is the ids 3 and 1, and spaces are nothing."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(c) for c in text.strip()]}


def known(answers: dict[int, list[int]], vocab_size: int, *, wrong: bool = False) -> Told:
    """Propose the right answer of every request, told apart by its seed, or always something else."""
    return Told("known", answers, vocab_size, is_wrong=wrong)


def table_engine(
    target: TableModel,
    k: int = 0,
    proposer: Proposer | TableModel | None = None,
    *,
    rows: int = 512,
    num_blocks: int = 4096,
    budget: int | None = None,
    tells_laws: bool = False,
) -> Engine:
    """A real engine on a table; a TableModel as proposer drafts as a second model does."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    if isinstance(proposer, TableModel):
        runner = cast(ModelRunner, proposer)
        proposer = DraftModelProposer(
            runner, pool, vocab_size=target.table.shape[-1], max_catch_up=2**16, tells_laws=tells_laws
        )
    proposer = proposer if k and proposer is not None else NoDrafts()
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget or rows * (k + 4))
    controller = FixedLength(k, proposer.max_draft_position)
    return Engine(cast(ModelRunner, target), proposer, controller, Scheduler(config, pool), max_model_len=2**20)


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """All requests to their end, in one go; those without a seed take their number for one."""
    pairs = enumerate(zip(prompts, params, strict=True))
    requests = [engine.make_request(str(i), prompt, own, base_seed=i) for i, (prompt, own) in pairs]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free_blocks == engine.scheduler.pool.num_blocks
    assert not [r.error for r in requests if r.error]
    return requests
