"""What the engine tests of both machines share: a tiny engine, its prompts, and steps to record."""

from __future__ import annotations

from typing import Any

import torch

from specdec.config import ModelConfig, SpeculativeConfig
from specdec.llm import LLM
from specdec.models.forward_batch import Segment
from specdec.models.graphs import Capture, GraphedForward
from specdec.models.loader import load
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]


def build(directory: str, draft: str | None, **options: Any) -> LLM:
    """In float64: no id may differ."""
    options.setdefault("speculative", SpeculativeConfig(profile_seconds=0))  # nothing is slower than the interpreter
    return LLM(directory, draft, dtype="float64", num_kv_blocks=32, block_size=16, **options)


def rejecting(directory: str, draft: str, max_tokens: int) -> tuple[list[list[int]], int, int]:
    """Output ids of a greedy and a seeded prompt under rejection, and how many drafts were kept and refused.

    Lengths are fixed, for they decide what is drawn.
    """
    config = SpeculativeConfig(acceptance="rejection", num_speculative_tokens=2, adaptive=False)
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]
    outputs = build(directory, draft, speculative=config).generate(PROMPTS, params, progress=False)
    stats = outputs[1].outputs[0].stats
    refused = stats.num_draft_tokens - stats.num_accepted_tokens
    return [output.outputs[0].token_ids for output in outputs], stats.num_accepted_tokens, refused


def generate(llm: LLM, max_tokens: int = 5, **params: Any) -> list[list[int]]:
    """Output ids of the prompts."""
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def steps() -> list[list[Segment]]:
    """Steps of one bucket: decode, verification, a chunk beside them; other lengths, blocks and rows each time."""
    return [
        [Segment([5, 6, 7], 0, [3], 1), Segment([9, 8], 0, [1], 1)],
        [Segment([4], 3, [3], 1), Segment([8, 8, 7], 2, [1], 3)],
        [Segment([4, 4], 4, [3], 2), Segment([8], 5, [1], 1), Segment([1, 2, 3], 0, [7], 0)],
        [Segment([2] * 8, 0, [0], 8)],
    ]


def check_replays(directory: str, capture: Capture, device: str) -> GraphedForward:
    """Replayed logits against computed ones, step by step."""
    model = load(ModelConfig(model=directory, dtype="float64", device=device))
    runner = ModelRunner(model, 8, 16)
    expected = [runner.forward(runner.pack(segments)).clone() for segments in steps()]
    runner = ModelRunner(model, 8, 16)
    graphs = runner.record_with(capture)
    for segments, logits in zip(steps(), expected):
        assert torch.allclose(runner.forward(runner.pack(segments)), logits, rtol=1e-9, atol=1e-9)
    return graphs
