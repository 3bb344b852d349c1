"""The whole step on toys in float64: the output is plain decoding's, whatever is proposed or squeezed."""

from __future__ import annotations

import itertools
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec
from tests.engines import Oracle, assert_clean, ids, llm, proposing
from tests.toys import make_toy

PROMPTS = [list(range(5, 5 + n)) for n in (3, 16, 17, 40)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=pytest.mark.slow) if f == "qwen3" else f for f in FAMILIES],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft that knows nothing of it."""
    folder = tmp_path_factory.mktemp(request.param)
    options = FAMILIES[request.param]
    return (
        make_toy(folder / "target", request.param, **options),
        make_toy(folder / "draft", request.param, seed=1, **options),
    )


def _transformers_ids(path: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    out = []
    for prompt in prompts:
        sequence = torch.tensor([prompt])
        for _ in range(count):
            with torch.inference_mode():
                scores = model(sequence, use_cache=False).logits[0, -1]
            sequence = torch.cat([sequence, scores.argmax()[None, None]], dim=1)
        out.append(sequence[0, len(prompt) :].tolist())
    return out


def test_ids_equal_transformers_for_every_proposer_and_cache(family: tuple[str, str]) -> None:
    target, draft = family
    expected = _transformers_ids(target, PROMPTS, 20)
    seeded = ids(llm(target), PROMPTS, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    cases: list[dict[str, Any]] = [
        {},
        {"draft": "ngram", "k": 4},
        {"draft": target, "k": 5},
        {"draft": draft, "k": 4},
        {"draft": draft, "k": 3, "block_size": 4, "num_kv_blocks": 28, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"draft": target, "k": 8, "block_size": 64, "enable_prefix_caching": False},
    ]
    for case in cases:
        made = llm(target, **case)
        assert ids(made, PROMPTS, max_tokens=20, ignore_eos=True) == expected, case
        assert ids(made, PROMPTS, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True) == seeded, case


def test_logits_equal_transformers(family: tuple[str, str]) -> None:
    target, _ = family
    made = llm(target, max_num_batched_tokens=8, max_num_seqs=4)  # the prompt goes in by chunks
    runner, rows = made.engine.target, []
    original = runner.forward

    def spy(batch: Any) -> torch.Tensor:
        scores = original(batch)
        rows.append(scores)
        return scores

    runner.forward = spy  # type: ignore[method-assign]
    try:
        [out] = ids(made, [PROMPTS[3]], max_tokens=12, ignore_eos=True)
    finally:
        runner.forward = original  # type: ignore[method-assign]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[3] + out])).logits[0, len(PROMPTS[3]) - 1 : -1]
    got = torch.cat([scores for scores in rows if len(scores)])
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("k", [1, 2, 5])
def test_an_always_right_proposer_gives_k_plus_1_tokens_a_step(toy: str, k: int) -> None:
    made = llm(toy)
    count = 6 * (k + 1) + 1  # the first token comes from the prompt's step
    answers = ids(made, PROMPTS, max_tokens=count, ignore_eos=True)
    oracle = Oracle({tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)})
    with proposing(made, oracle, k):
        outputs = made.generate(PROMPTS, specdec.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    for output, answer in zip(outputs, answers, strict=True):
        assert output.outputs[0].token_ids == answer
        assert output.stats.num_steps == 7 and output.stats.acceptance_rate == 1.0
        assert output.stats.accepted_per_pos == output.stats.drafted_per_pos == [6] * k


def test_an_always_wrong_proposer_gives_1_token_a_step(toy: str) -> None:
    made = llm(toy)
    answers = ids(made, PROMPTS, max_tokens=20, ignore_eos=True)
    with proposing(made, Oracle({tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}, wrong=True), 4):
        outputs = made.generate(PROMPTS, specdec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == answers
    assert all(o.stats.mean_acceptance_length == 1.0 and o.stats.acceptance_rate == 0.0 for o in outputs)


@pytest.mark.parametrize("k", (1, 3, 4, 6, 8))
def test_the_earliest_end_inside_an_accepted_run_wins(toy: str, k: int) -> None:
    """EOS, stop ids and max_tokens in the middle of a verified run end the output right there."""
    made = llm(toy)
    prompt = PROMPTS[1]
    [answer] = ids(made, [prompt], max_tokens=24, ignore_eos=True)
    with proposing(made, Oracle({tuple(prompt): answer}), k):
        for most in range(1, 12):
            [out] = made.generate([prompt], specdec.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
            assert out.outputs[0].token_ids == answer[:most] and out.outputs[0].finish_reason == "length"
        for place in range(12):
            stop = answer[place]
            first = answer.index(stop)
            params = specdec.SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], ignore_eos=True)
            [out] = made.generate([prompt], params)
            assert out.outputs[0].token_ids == answer[: first + 1] and out.outputs[0].finish_reason == "stop"
            assert out.stats.acceptance_rate in (0.0, 1.0)  # drafts behind the stop were never judged
            for most in (first, first + 1):  # a stop at the cap is a stop; past the cap it is a length
                if most:
                    params = specdec.SamplingParams(temperature=0, max_tokens=most, stop_token_ids=[stop])
                    [out] = made.generate([prompt], params)
                    assert out.outputs[0].finish_reason == ("length" if most == first else "stop")
    assert_clean(made)


def test_every_declared_eos_stops_and_ignore_eos_turns_all_off(toy: str) -> None:
    made = llm(toy)
    [answer] = ids(made, [PROMPTS[0]], max_tokens=12, ignore_eos=True)
    model = made.engine.target.model
    kept = model.eos_token_ids
    object.__setattr__(model, "eos_token_ids", kept | {answer[3], answer[5]})
    try:
        with proposing(made, Oracle({tuple(PROMPTS[0]): answer}), 5):
            end = min(answer.index(answer[3]), answer.index(answer[5])) + 1
            assert ids(made, [PROMPTS[0]], max_tokens=12) == [answer[:end]]
            assert ids(made, [PROMPTS[0]], max_tokens=12, ignore_eos=True) == [answer]
    finally:
        object.__setattr__(model, "eos_token_ids", kept)


def test_a_draft_that_always_proposes_eos_changes_nothing(toy: str) -> None:
    made = llm(toy)
    answer = ids(made, PROMPTS, max_tokens=20)
    with proposing(made, Oracle({}, token=257), 4):
        assert ids(made, PROMPTS, max_tokens=20) == answer


def test_self_draft_is_always_right_cold_cached_chunked_and_preempted(toy: str) -> None:
    params = specdec.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    sampled = specdec.SamplingParams(temperature=1.2, seed=1, max_tokens=60, ignore_eos=True)
    long = [list(range(3, 99)), list(range(50, 120)), list(range(7, 90))]
    for options in ({}, {"max_num_batched_tokens": 24, "max_num_seqs": 8}, {"num_kv_blocks": 20}):
        made = llm(toy, draft=toy, k=4, **options)
        for own in (params, params, sampled):  # the second run hits the prefix cache
            outputs = made.generate(long, own, progress=False)
            assert all(o.stats.acceptance_rate == 1.0 for o in outputs), options
    assert any(o.stats.num_preemptions for o in outputs), "the small pool was meant to preempt"
    assert_clean(made)


def test_requests_of_one_batch_are_as_if_alone(toy: str, toy_draft: str) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"temperature": 1, "seed": 2, "top_k": 1},
        {"temperature": 1, "seed": 3, "top_p": 0.1},
        {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.7, "seed": 5, "speculative": {"enabled": False}},
        {"temperature": 0.7, "seed": 6, "speculative": {"num_speculative_tokens": 1}},
    ]
    params = [specdec.SamplingParams(max_tokens=20, ignore_eos=True, **kind) for kind in kinds]
    plain, made = llm(toy), llm(toy, draft=toy_draft, k=4)
    together = made.generate([PROMPTS[1]] * len(params), params, progress=False)
    for output, own in zip(together, params, strict=True):
        [alone] = plain.generate([PROMPTS[1]], own)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert together[5].stats.num_draft_tokens == 0
    assert max(len(together[6].stats.drafted_per_pos), 1) == 1


def test_choices_differ_and_are_reproducible_and_unseeded_calls_vary(toy: str) -> None:
    made = llm(toy, draft="ngram")
    choices = ids(made, [PROMPTS[0]], temperature=1, seed=9, n=4, max_tokens=12)
    assert len({tuple(c) for c in choices}) == 4
    assert ids(made, [PROMPTS[0]], temperature=1, seed=9, n=4, max_tokens=12) == choices
    assert ids(made, [PROMPTS[0]], temperature=1, seed=9, max_tokens=12) == choices[:1]
    unseeded = [tuple(ids(made, [PROMPTS[0]], temperature=1, max_tokens=12)[0]) for _ in range(6)]
    assert len(set(unseeded)) == 6


def test_requests_that_can_never_fit_are_refused_with_the_numbers(toy: str) -> None:
    made = llm(toy, num_kv_blocks=4)  # 64 tokens
    params = specdec.SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(specdec.ContextLengthError, match=r"cache holds 64 tokens \(4 blocks of 16\)"):
        made.generate([[1] * 100], params)
    with pytest.raises(specdec.ContextLengthError, match="can never fit"):
        made.generate([[1] * 10], specdec.SamplingParams(max_tokens=200))
    assert len(ids(made, [[1] * 64], max_tokens=1)[0]) == 1
    assert len(ids(made, [[1] * 60], max_tokens=None, ignore_eos=True)[0]) == 5


def test_the_model_length_is_a_limit_for_prompt_and_output_together(toy: str) -> None:
    made = llm(toy, draft="ngram", k=5, max_model_len=32)
    for length in (32, 33):
        with pytest.raises(specdec.ContextLengthError, match="model length is 32"):
            made.generate([[1] * length], specdec.SamplingParams(max_tokens=1))
    assert len(ids(made, [[1] * 31], max_tokens=1)[0]) == 1
    for length in (20, 29, 30, 31):  # n-gram drafts never run past the end
        for most in (None, 32 - length):
            assert len(ids(made, [[1] * length], max_tokens=most, ignore_eos=True)[0]) == 32 - length
        with pytest.raises(
            specdec.ContextLengthError, match=rf"prompt has {length} tokens and max_tokens is 33; .* 32"
        ) as e:
            made.generate([[1] * length], specdec.SamplingParams(max_tokens=33))
        assert e.value.param == "max_tokens" and f"at most {32 - length} here" in str(e.value)


def test_a_draft_with_a_shorter_length_falls_silent_behind_it(toy: str, tmp_path: Path) -> None:
    short = make_toy(tmp_path / "short", max_position_embeddings=64)
    prompts = [list(range(1, 60)), list(range(1, 100))]
    made = llm(toy, draft=short, k=4)
    outputs = made.generate(prompts, specdec.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == ids(llm(toy), prompts, max_tokens=30, ignore_eos=True)
    assert outputs[0].stats.num_draft_tokens > 0 and outputs[1].stats.num_draft_tokens == 0


@pytest.mark.parametrize(("target_size", "draft_size"), [(260, 272), (272, 260)])
def test_padded_vocabularies_of_different_sizes_work(tmp_path: Path, target_size: int, draft_size: int) -> None:
    target = make_toy(tmp_path / "target", vocab_size=target_size)
    draft = make_toy(tmp_path / "draft", vocab_size=draft_size)
    plain = ids(llm(target), PROMPTS, temperature=1, seed=1, max_tokens=20)
    assert ids(llm(target, draft=draft, k=4), PROMPTS, temperature=1, seed=1, max_tokens=20) == plain


def test_another_tokenizer_is_refused_naming_the_first_difference(toy: str, tmp_path: Path) -> None:
    other = make_toy(tmp_path / "other")
    from tests.toys import byte_tokenizer

    changed = byte_tokenizer()
    changed.add_tokens(["hello"])
    changed.save_pretrained(other)
    with pytest.raises(specdec.ModelLoadError, match=r"id 260 is None for the target and 'hello' for the draft"):
        specdec.LLM(toy, other, num_kv_blocks=8, dtype="float64")


def test_a_directory_without_a_tokenizer_takes_and_gives_ids(tmp_path: Path) -> None:
    bare = llm(make_toy(tmp_path / "bare", tokenizer=False))
    [output] = bare.generate([[1, 2, 3]], specdec.SamplingParams(temperature=0, max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5 and output.outputs[0].text == ""
    with pytest.raises(specdec.InvalidRequestError, match="no tokenizer"):
        bare.generate("text")
    with pytest.raises(specdec.InvalidRequestError, match="no tokenizer"):
        bare.generate([[1]], specdec.SamplingParams(stop="x"))


def test_a_row_whose_scores_are_not_finite_fails_alone(toy: str) -> None:
    made = llm(toy)
    expected = ids(made, PROMPTS[:2], max_tokens=8, ignore_eos=True)
    runner = made.engine.target
    original, calls = runner.forward, itertools.count()

    def poison(batch: Any) -> torch.Tensor:
        scores = original(batch)
        if next(calls) == 3:
            scores = scores.clone()
            scores[-1, 5] = float("nan")
        return scores

    runner.forward = poison  # type: ignore[method-assign]
    try:
        outputs = made.generate(PROMPTS[:3], specdec.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    finally:
        runner.forward = original  # type: ignore[method-assign]
    assert [o.outputs[0].token_ids for o in outputs[:2]] == expected
    assert outputs[2].outputs[0].finish_reason == "error" and "not finite" in (outputs[2].outputs[0].error or "")
    assert_clean(made)


@pytest.mark.parametrize("fault", [RuntimeError, torch.OutOfMemoryError, MemoryError])
def test_a_step_that_raises_fails_its_rows_and_spares_those_waiting(
    toy: str, caplog: pytest.LogCaptureFixture, fault: type[Exception]
) -> None:
    made = llm(toy, max_num_seqs=2, max_num_batched_tokens=64)
    runner = made.engine.target
    original, calls = runner.forward, itertools.count()

    def fail_once(batch: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise fault("out of memory")
        return original(batch)

    runner.forward = fail_once  # type: ignore[method-assign]
    try:
        with caplog.at_level(logging.CRITICAL, "specdec"):
            outputs = made.generate(PROMPTS[:3], specdec.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    finally:
        runner.forward = original  # type: ignore[method-assign]
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error", "length"]
    assert "out of memory" in (outputs[0].outputs[0].error or "")
    assert not made.engine.is_dead
    assert_clean(made)


def test_two_faults_in_a_row_end_the_engine(toy: str, caplog: pytest.LogCaptureFixture) -> None:
    made = specdec.LLM(toy, None, num_kv_blocks=8, dtype="float64")

    def broken(batch: Any) -> torch.Tensor:
        raise RuntimeError("gone")

    made.engine.target.forward = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.CRITICAL, "specdec"):
        for _ in range(2):
            [output] = made.generate([[1, 2]], specdec.SamplingParams(max_tokens=2))
            assert output.outputs[0].finish_reason == "error"
    assert made.engine.is_dead
    with pytest.raises(specdec.EngineDeadError):
        made.generate([[1, 2]], specdec.SamplingParams(max_tokens=2))


def test_an_abort_frees_everything_and_the_others_go_on(toy: str) -> None:
    made = llm(toy, draft="ngram", k=3)
    expected = ids(made, [PROMPTS[0]], max_tokens=20, ignore_eos=True)[0]
    engine = made.engine
    params = specdec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    kept, dropped = engine.make_request("kept", PROMPTS[0], params), engine.make_request("dropped", PROMPTS[1], params)
    engine.add(kept)
    engine.add(dropped)
    engine.step()
    engine.step()
    assert engine.abort("dropped") is dropped and engine.abort("dropped") is None
    while engine.has_work:
        engine.step()
    assert kept.output_token_ids == expected and 0 < dropped.num_output_tokens < 20
    assert_clean(made)


def test_two_threads_share_one_engine_by_turns(toy: str) -> None:
    made = llm(toy, draft="ngram", k=3)
    expected = ids(made, PROMPTS[:2], max_tokens=15, ignore_eos=True)
    params = specdec.SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda i: made.generate([PROMPTS[i % 2]], params)[0].outputs[0].token_ids, range(8)))
    assert outputs == [expected[i % 2] for i in range(8)]
    assert_clean(made)


def test_a_bad_prompt_among_good_ones_queues_nothing(toy: str) -> None:
    made = llm(toy)
    with pytest.raises(specdec.InvalidRequestError, match="prompt holds 9999"):
        made.generate([[1], [2], [9999]], specdec.SamplingParams(max_tokens=2))
    for bad in ([[]], "", [[-1]], [[1.5]], [[True]], [[2**40]], [None], [{1, 2}], [1, 2]):
        with pytest.raises(specdec.InvalidRequestError, match="prompt"):
            made.generate(bad, specdec.SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    assert made.generate([]) == []
    assert_clean(made)


def test_ctrl_c_takes_effect_between_steps_and_leaves_the_engine_usable(toy: str) -> None:
    made = llm(toy, draft="ngram", k=3)
    expected = ids(made, PROMPTS, max_tokens=20, ignore_eos=True)
    original, calls = made.engine.scheduler.commit, itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step
        return original(*args)

    made.engine.scheduler.commit = interrupted  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            made.generate(PROMPTS, specdec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    finally:
        made.engine.scheduler.commit = original  # type: ignore[method-assign]
    assert signal.getsignal(signal.SIGINT) is before
    assert_clean(made)
    assert ids(made, PROMPTS, max_tokens=20, ignore_eos=True) == expected


def test_arguments_of_the_wrong_kind_are_refused_by_name(toy: str) -> None:
    made = llm(toy)
    for prompts in (None, 5, iter(["a", "b"]), {"prompt": "a"}, {1, 2}):
        with pytest.raises(specdec.InvalidRequestError, match="prompts is"):
            made.generate(prompts)  # type: ignore[arg-type]
    for params in ({"n": 1}, [None], 5):
        with pytest.raises(specdec.InvalidRequestError, match="sampling_params"):
            made.generate("a", params)  # type: ignore[arg-type]
    for messages in ([], None, [{"x": 1}], [5]):
        with pytest.raises(specdec.InvalidRequestError, match="messages"):
            made.chat(messages)  # type: ignore[arg-type]
    for options in ({"enable_prefix_caching": "no"}, {"gpu_memory_utilization": "x"}, {"device": None}):
        with pytest.raises(specdec.InvalidRequestError, match=next(iter(options))):
            specdec.LLM(toy, None, **options)
    speculative = specdec.SpeculativeConfig(method="draft_model", draft=toy)
    with pytest.raises(specdec.InvalidRequestError, match="say it once"):
        specdec.LLM(toy, "/nope", speculative=speculative)
    for value in (10**400, -(10**400)):
        with pytest.raises(specdec.InvalidRequestError, match="temperature"):
            specdec.SamplingParams(temperature=value)
