"""Log-probabilities: one value an emitted token, the model's own, the same with and without speculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec
from specdec.logprobs import TokenLogprob
from specdec.sampling.logprobs import describe
from tests.engines import Oracle, assert_clean, ids, llm, proposing
from tests.sampling.by_hand import law
from tests.sampling.table_model import TableModel, run, table_engine

PROMPTS = [list(range(5, 5 + n)) for n in (3, 16, 17, 40)]


def _outputs(made: specdec.LLM, prompts: list[list[int]], **params: Any) -> list[specdec.RequestOutput]:
    outputs = made.generate(prompts, specdec.SamplingParams(**params), progress=False)
    assert_clean(made)
    return outputs


def _reference(path: str, sequence: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([sequence]), use_cache=False).logits[0], dim=-1)


def _agree(value: TokenLogprob | None, token_id: int, row: torch.Tensor, num_top: int, atol: float = 1e-5) -> None:
    assert value is not None and value.logprob is not None
    assert value.token_id == token_id and abs(value.logprob - float(row[token_id])) < atol
    assert value.rank == int((row > row[token_id] + atol).sum()) + 1
    best = row.topk(num_top) if num_top else None
    assert [i for i, _ in value.top] == ([] if best is None else best.indices.tolist())
    for (_, logprob), expected in zip(value.top, [] if best is None else best.values.tolist(), strict=True):
        assert logprob is not None and abs(logprob - expected) < atol


@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_logprobs_are_those_of_transformers(toy: str, toy_draft: str, num_top: int) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 12, "ignore_eos": True, "top_p": 0.9}
    for made in (llm(toy), llm(toy, toy_draft, 4), llm(toy, toy, 5), llm(toy, "ngram", 3)):
        for output in _outputs(made, PROMPTS[:2], logprobs=num_top, presence_penalty=1.0, **params):
            choice = output.outputs[0]
            assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 12
            rows = _reference(toy, output.prompt_token_ids + choice.token_ids)
            for i, (value, token_id) in enumerate(zip(choice.logprobs, choice.token_ids, strict=True)):
                _agree(value, token_id, rows[len(output.prompt_token_ids) + i - 1], num_top)


def test_logprobs_in_float32_are_equal_with_and_without_speculation(toy: str) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    plain, drafted = (_outputs(llm(toy, d, k, dtype="float32"), PROMPTS, **params) for d, k in ((None, None), (toy, 4)))
    for one, other in zip(plain, drafted, strict=True):
        left, right = one.outputs[0].logprobs or [], other.outputs[0].logprobs or []
        assert [v.token_id for v in left] == [v.token_id for v in right]
        assert max(abs((a.logprob or 0) - (b.logprob or 0)) for a, b in zip(left, right, strict=True)) < 1e-3
        assert min(v.logprob or 0 for v in left) < -0.01  # not all nought


def test_nothing_is_reported_where_nothing_is_asked(toy: str) -> None:
    output = _outputs(llm(toy, "ngram", 3), PROMPTS[:1], max_tokens=4)[0]
    assert output.outputs[0].logprobs is None and output.prompt_logprobs is None


@pytest.mark.parametrize("budget", [8, 512])
def test_prompt_logprobs_with_chunks_and_a_warm_prefix_cache(toy: str, budget: int) -> None:
    made = llm(toy, "ngram", 3, max_num_batched_tokens=budget, max_num_seqs=4)
    prompt = [(7 * i) % 250 for i in range(160)]  # ten blocks
    rows = _reference(toy, prompt)
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    expected = ids(made, [prompt], **params)[0]
    for others in ([], [[9] * 30, [8] * 50], []):  # another request in between, and a second time
        outputs = _outputs(made, [prompt, *others], prompt_logprobs=2, logprobs=1, **params)
        values = outputs[0].prompt_logprobs
        assert values is not None and len(values) == len(prompt) and values[0] is None
        for i in range(1, len(prompt)):
            _agree(values[i], prompt[i], rows[i - 1], 2)
        assert outputs[0].outputs[0].token_ids == expected
    assert _outputs(made, [[5]], prompt_logprobs=0, max_tokens=1)[0].prompt_logprobs == [None]


def test_prompt_logprobs_survive_preemption(toy: str) -> None:
    params: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 30,
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "logprobs": 1,
    }
    calm = _outputs(llm(toy), PROMPTS, **params)
    tiny = llm(toy, "ngram", 3, block_size=4, num_kv_blocks=24, max_num_batched_tokens=16, max_num_seqs=8)
    squeezed = _outputs(tiny, PROMPTS, **params)
    assert sum(o.stats.num_preemptions for o in squeezed) > 0
    for one, other in zip(calm, squeezed, strict=True):
        assert [v and v.token_id for v in one.prompt_logprobs or []] == [
            v and v.token_id for v in other.prompt_logprobs or []
        ]
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert [v.rank for v in one.outputs[0].logprobs or []] == [v.rank for v in other.outputs[0].logprobs or []]


def test_processed_logprobs_are_those_of_the_law_drawn_from() -> None:
    target = TableModel.random(0)
    own: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "frequency_penalty": 1.0, "logit_bias": {2: 1.0}}
    params = specdec.SamplingParams(max_tokens=12, seed=1, logprobs=8, logprobs_mode="processed_logprobs", **own)
    for k in (0, 3):
        [request] = run(table_engine(target, k, target.near(1, 0.3)), [[3, 1]], [params])
        for i, value in enumerate(request.logprobs):
            output = request.output_token_ids[:i]
            expected = torch.tensor(law(target.scores([3, 1], output), [3, 1], output, own), dtype=torch.float64).log()
            assert abs((value.logprob or 9) - float(expected[value.token_id])) < 1e-9
            assert len(value.top) == 4 and value.rank <= 4  # the others are impossible


@pytest.mark.parametrize("cut", ["stop id", "stop string", "max_tokens", "eos"])
def test_text_ids_logprobs_and_counts_end_at_the_same_token(toy: str, cut: str) -> None:
    """The end lies inside an accepted run of seven."""
    made, prompt = llm(toy), PROMPTS[1]
    params: dict[str, Any] = {"temperature": 1.0, "seed": 8, "ignore_eos": True, "max_tokens": 40, "logprobs": 2}
    full = _outputs(made, [prompt], **params)[0].outputs[0]
    stop_at = next(i for i in range(9, 30) if full.token_ids[i] < 128 and full.token_ids[i] not in full.token_ids[:i])
    token_id, length = full.token_ids[stop_at], stop_at + 1
    text = made.tokenizer.decode(full.token_ids[:length]) if made.tokenizer else ""
    limits: dict[str, dict[str, Any]] = {
        "stop id": {"stop_token_ids": [token_id]},
        "stop string": {"stop": [chr(token_id)]},
        "max_tokens": {"max_tokens": length},
        "eos": {"ignore_eos": False},
    }
    runner = made.engine.target
    kept = runner.model
    if cut == "eos":
        runner.model = replace(kept, eos_token_ids=frozenset({token_id}))
    try:
        for k in (0, 6):
            with proposing(made, Oracle({tuple(prompt): full.token_ids}), k):
                choice = _outputs(made, [prompt], **{**params, **limits[cut]})[0].outputs[0]
            assert choice.token_ids == full.token_ids[:length]
            assert [v.token_id for v in choice.logprobs or []] == choice.token_ids
            for one, other in zip(choice.logprobs or [], full.logprobs or [], strict=False):
                assert one.rank == other.rank and abs((one.logprob or 0) - (other.logprob or 0)) < 1e-9
            assert choice.finish_reason == ("length" if cut == "max_tokens" else "stop")
            assert choice.stats.num_emitted == length
            if cut == "stop string":
                assert choice.text == text[:-1]
    finally:
        runner.model = kept


def test_a_stop_string_counts_only_behind_min_tokens(toy: str) -> None:
    made, prompt = llm(toy), PROMPTS[0]
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 30, "logit_bias": {65: 100, 66: 99.5}}
    params["frequency_penalty"] = 1.0  # A and B take turns
    free = _outputs(made, [prompt], **params)[0].outputs[0]
    assert set(free.text) == {"A", "B"}
    for k in (0, 5):
        with proposing(made, Oracle({tuple(prompt): free.token_ids}), k):
            choice = _outputs(made, [prompt], **params, stop=["A"], min_tokens=7)[0].outputs[0]
        assert len(choice.token_ids) == 7 + free.text[6:].index("A")
        assert choice.text == free.text[: len(choice.token_ids) - 1]


def test_reports_hold_no_number_that_is_not_finite() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [float("nan"), 0.0, 0.0]])
    first, second = describe(logits, [1, 1], 3)
    assert first.logprob is None and first.rank == 3 and [i for i, _ in first.top] == [2, 0]
    assert second.logprob is None and second.top == ()


def test_ties_are_ranked_alike_and_listed_by_id() -> None:
    [value] = describe(torch.zeros(1, 200), [150], 3)
    assert value.rank == 1 and [i for i, _ in value.top] == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_one_logprob_wherever_it_is_told(dtype: torch.dtype) -> None:
    scores = (7 * torch.randn(64, 301, generator=torch.Generator().manual_seed(2))).to(dtype)
    for report in describe(scores, scores.argmax(dim=1).tolist(), 3):
        assert report.logprob == dict(report.top)[report.token_id]
