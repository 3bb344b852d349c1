"""The real model: SmolLM2-135M in fp32 says what transformers says, whatever is proposed.

The reference ids were made by `python -m tests.make_reference`. A fork is legitimate only where the
reference's two best scores lie closer than 2e-4 (floating point, README: Limits).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec.models.sources import resolve
from tests.engines import assert_clean, llm
from tests.toys import make_toy

NEAR_TIE = 2e-4
ROWS = json.loads((Path(__file__).parent / "reference.json").read_text())["rows"]
PROMPTS = [row["prompt_ids"] for row in ROWS]


def illegitimate_forks(outputs: list[list[int]], rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(prompt, position) of every first difference that no near-tie of the reference explains."""
    forks = []
    for index, (ids, row) in enumerate(zip(outputs, rows, strict=True)):
        if ids == row["ids"]:
            continue
        at = next((i for i, (a, b) in enumerate(zip(ids, row["ids"], strict=False)) if a != b), None)
        if at is None or row["gaps"][at] >= NEAR_TIE:
            forks.append((index, at if at is not None else min(len(ids), len(row["ids"]))))
    return forks


@pytest.fixture(scope="module")
def target() -> str:
    return str(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random draft of the same vocabulary: always wrong."""
    folder = tmp_path_factory.mktemp("stranger") / "draft"
    return make_toy(folder, hidden_size=32, vocab_size=49152, num_hidden_layers=1, tokenizer=False)


def _ids(made: specdec.LLM, **params: Any) -> list[list[int]]:
    outputs = made.generate(PROMPTS, specdec.SamplingParams(max_tokens=48, **params), progress=False)
    assert_clean(made)
    return [o.outputs[0].token_ids for o in outputs]


def test_ids_equal_transformers_and_seeds_hold(target: str, stranger: str) -> None:
    plain = llm(target, dtype="float32")
    assert not illegitimate_forks(_ids(plain, temperature=0), ROWS)
    seeded = _ids(plain, temperature=0.8, seed=11)
    cases = [{"draft": "ngram", "k": 8, "block_size": 64}, {"draft": stranger, "k": 4}]
    for case in cases:
        made = llm(target, dtype="float32", **case)
        assert not illegitimate_forks(_ids(made, temperature=0), ROWS), case
        assert _ids(made, temperature=0.8, seed=11) == seeded, case


def test_one_at_a_time_equals_all_together(target: str) -> None:
    made = llm(target, draft="ngram", k=4, dtype="float32")
    params = specdec.SamplingParams(temperature=0, max_tokens=48)
    alone = [made.generate([p], params)[0].outputs[0].token_ids for p in PROMPTS[:3]]
    assert not illegitimate_forks(alone, ROWS[:3])


def test_a_self_draft_is_accepted_without_exception(target: str) -> None:
    made = llm(target, draft=target, k=4, dtype="float32")
    for params in ({"temperature": 0}, {"temperature": 0.8, "seed": 4}):
        outputs = made.generate(PROMPTS[:4], specdec.SamplingParams(max_tokens=48, ignore_eos=True, **params))
        assert [o.stats.acceptance_rate for o in outputs] == [1.0] * 4
        assert all(o.stats.mean_acceptance_length == 48 / 11 for o in outputs)  # 1 + 9 * 5 + 2 tokens in 11 steps


def test_the_comparison_catches_one_wrong_token() -> None:
    outputs = [list(row["ids"]) for row in ROWS]
    assert not illegitimate_forks(outputs, ROWS)
    outputs[2][7] += 1
    assert illegitimate_forks(outputs, ROWS) == [(2, 7)]
    assert illegitimate_forks([outputs[0][:-1]], ROWS[:1]) == [(0, len(outputs[0]) - 1)]


def test_bf16_speculation_says_what_bf16_plain_decoding_says(target: str) -> None:
    """On the native path a token's bits do not depend on its batch, so equality is exact even in bf16."""
    from specdec.kernels import native

    if not native.enabled():
        pytest.skip("the native kernels are not built here; other paths round by batch")
    plain = llm(target, dtype="bfloat16")
    made = llm(target, draft="ngram", k=6, dtype="bfloat16")
    for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        assert _ids(made, **params) == _ids(plain, **params)
    assert plain.engine.target.model.dtype == torch.bfloat16


def test_what_a_user_gets_who_says_nothing_drafts_and_changes_no_token() -> None:
    """The defaults, with the draft that ships beside lookups: texts that repeat themselves and texts that do not."""
    made = specdec.LLM("smollm2-135m", num_kv_blocks=64)
    prompts = ["Once upon a time", "a b c " * 12, "one two three four " * 8, "The capital of France is"]
    greedy = specdec.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = specdec.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, speculative={"enabled": False})
    told = [out.outputs[0] for out in made.generate(prompts, plain, progress=False)]
    for given in (prompts, prompts[:1], prompts[1:2]):  # together and alone
        found = made.generate(given, greedy, progress=False)
        for out in found:
            said = told[prompts.index(out.prompt)]
            assert (out.outputs[0].finish_reason, out.outputs[0].token_ids) == ("length", said.token_ids)
    assert out.stats.num_accepted_tokens > 20  # the last repeats itself
    assert_clean(made)
