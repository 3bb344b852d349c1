"""A fork is allowed only where rounding explains it."""

from __future__ import annotations

from pathlib import Path

import torch

from evals.equality import Fork, Judge, is_equal
from evals.load import Job
from evals.workloads import Prompt
from specdec import LLM, SamplingParams

PROMPT = tuple(b"what is a fork?")


def test_only_near_ties_are_allowed(toy: str) -> None:
    """At every position the reference's own choice has gap 0, and a token of another rank has its true gap."""
    llm = LLM(toy, None, dtype="float32", num_kv_blocks=16)
    reference = llm.generate([list(PROMPT)], SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0].token_ids
    job = Job(Prompt("what is a fork?", "chat"), PROMPT, 4, 0.0, 0)
    judge = Judge(Path(toy), "float32")
    assert judge.forks([job], [reference], [reference]) == []
    wrong = [reference[0], (reference[1] + 1) % 256, *reference[2:]]
    (fork,) = judge.forks([job], [reference], [wrong])
    assert (fork.job, fork.position) == (0, 1)
    assert fork.gap is not None and fork.gap > fork.tolerance == 2e-4
    assert not is_equal([fork], 4, "float32")


def test_an_output_that_ends_early_is_never_allowed(toy: str) -> None:
    job = Job(Prompt("what is a fork?", "chat"), PROMPT, 4, 0.0, 0)
    (fork,) = Judge(Path(toy), "bfloat16").forks([job], [[1, 2, 3]], [[1, 2]])
    assert fork.gap is None and not fork.is_allowed


def test_tolerance_follows_the_dtype(toy: str) -> None:
    """bfloat16 has 8 bits: at logits near 4 two of its steps are 2 * 2**-7 * 4."""
    judge = Judge(Path(toy), "bfloat16")
    assert judge.tolerance(4.0, 0.0) == 2 * torch.finfo(torch.bfloat16).eps * 4
    assert judge.tolerance(4.0, 0.5) == 2 * judge.tolerance(4.0, 0.0)
    assert Judge(Path(toy), "float64").tolerance(4.0, 0.0) == 0


def test_allowed_forks_must_be_rare_in_float32() -> None:
    near = Fork(job=0, position=0, gap=1e-5, tolerance=2e-4)
    assert is_equal([near], 100, "float32")
    assert not is_equal([near, near], 10_000, "float32")
    assert is_equal([near, near], 20_000, "float32")
    assert is_equal([near, near], 100, "bfloat16")
