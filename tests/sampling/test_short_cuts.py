"""The ways most rows go are short cuts: each gives what the long way gives, and steps aside where it would not."""

from __future__ import annotations

import importlib
import random

import pytest
import torch

from specdec.batch import Batch, Row, Verdict
from specdec.request import Request
from specdec.sampling.sampler import choose_plain
from specdec.sampling.verify import verify
from specdec.sampling_params import SamplingParams

PLAIN = [{}, {"temperature": 0.0}, {"temperature": 1e-7}, {"temperature": 0.3}, {"temperature": 0.0, "top_p": 0.5}]
ASKING = [
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.1},
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": [1, 2]},
    {"min_tokens": 9, "stop_token_ids": [4]},
]


def _request(name: str, params: dict[str, object], num_output: int) -> Request:
    own = SamplingParams(max_tokens=64, **params)  # type: ignore[arg-type]
    stop_ids = frozenset(own.stop_token_ids or ())
    request = Request(name, [1, 2, 3], own, noise_seed=num_output, max_output_tokens=64, stop_token_ids=stop_ids)
    request.token_ids += [i % 7 for i in range(num_output)]
    return request


def _batch(dice: random.Random, kinds: list[dict[str, object]]) -> Batch:
    rows = []
    for index in range(dice.randint(1, 9)):
        request = _request(f"{index}-{dice.random()}", dice.choice(kinds), dice.randint(0, 20))
        size = dice.randint(0, 4)
        is_chunk = dice.random() < 0.2
        row = Row(request, 0, 2) if is_chunk else Row(request, request.num_tokens - 1, 1, size)
        rows.append(row if is_chunk else row.with_drafts(tuple(dice.randrange(9) for _ in range(size)), "test"))
    return Batch(tuple(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_plain_rows_are_judged_as_on_the_long_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, taken = random.Random(3), 0
    for trial in range(60):
        batch = _batch(dice, PLAIN)
        num_logits = sum(row.num_logits for row in batch)
        logits = torch.randn(num_logits, 9, generator=torch.Generator().manual_seed(trial)).to(dtype)
        if num_logits and trial % 3 == 0:
            logits[dice.randrange(num_logits)] = float("nan")
        short = verify(batch, logits)
        taken += choose_plain(logits, [(row.request, row.num_choices) for row in batch]) is not None
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("specdec.sampling.verify"), "choose_plain", lambda *_: None)
            assert verify(batch, logits) == short
    assert taken in (0, 60)  # none where the native kernels are missing


@pytest.mark.parametrize("params", ASKING, ids=str)
def test_one_row_that_asks_for_more_takes_the_long_way(params: dict[str, object]) -> None:
    requests = [_request("plain", {"temperature": 0.7}, 2), _request("asking", {"temperature": 0.7, **params}, 2)]
    assert choose_plain(torch.zeros(2, 9), [(request, 1) for request in requests]) is None


def test_a_verdict_tells_whose_scores_failed_behind_which_drafts() -> None:
    request = _request("row", {"temperature": 0.0}, 3)
    batch = Batch((Row(request, request.num_tokens - 1, 1, 2).with_drafts((4, 5), "test"),))
    logits = torch.zeros(3, 9)
    logits[0, 4] = 1.0
    logits[1] = float("nan")
    assert verify(batch, logits) == Verdict(((4,),), (True,))


def test_tokens_are_appended_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(5)
    kept_whole = 0
    for _ in range(400):
        params = SamplingParams(stop_token_ids=[7] if dice.random() < 0.5 else None, min_tokens=dice.randint(0, 4))
        ids = [dice.randrange(9) for _ in range(dice.randint(0, 6))]
        most = dice.randint(4, 9)
        pair = [
            Request("r", [1], params, max_output_tokens=most, stop_token_ids=frozenset(params.stop_token_ids or ()))
            for _ in range(2)
        ]
        first = pair[0].extend(ids)
        with monkeypatch.context() as patch:
            patch.setattr(Request, "_only_grows", lambda *_: False)
            second = pair[1].extend(ids)
        kept_whole += first == len(ids)
        assert (first, pair[0].token_ids, pair[0].finish_reason) == (second, pair[1].token_ids, pair[1].finish_reason)
    assert 0 < kept_whole < 400
