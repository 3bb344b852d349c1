"""Faults users met elsewhere, as claims about whole kinds: the paged cache and the queue.

Numbers in names are the rows of the list of field cases. Row 61 (a result applied after its request
was preempted) cannot occur: a step is planned, run and committed without a gap.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec
from tests.engines import assert_clean, ids, llm
from tests.toys import make_toy

BIG = {"num_kv_blocks": 64, "block_size": 64, "enable_prefix_caching": False}


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_53_a_prompt_of_whole_cached_blocks_still_computes_its_last_token(toy: str) -> None:
    made = llm(toy, draft="ngram", k=3)
    for length in (16, 32, 48):
        prompt = _prompt(length)
        first = ids(made, [prompt], max_tokens=12)
        [again] = made.generate([prompt], specdec.SamplingParams(temperature=0, max_tokens=12))
        assert again.outputs[0].token_ids == first[0]
        assert again.stats.num_cached_tokens == length - 16


def test_55_preemption_one_past_a_block_edge_changes_nothing(toy: str, toy_draft: str) -> None:
    for length, params in ((15, {"temperature": 0}), (16, {"temperature": 0}), (17, {"temperature": 1.0, "seed": 5})):
        prompts = [_prompt(length, 1), _prompt(length, 2), _prompt(length, 3)]
        expected = ids(llm(toy, **BIG), prompts, max_tokens=40, ignore_eos=True, **params)
        made = llm(toy, draft=toy_draft, k=3, num_kv_blocks=6)
        assert ids(made, prompts, max_tokens=40, ignore_eos=True, **params) == expected
    assert made.engine.scheduler.num_preemptions > 1


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_57_block_edges_do_not_show(toy: str, block_size: int) -> None:
    prompts = [_prompt(n, n) for n in (15, 16, 17)]
    expected = ids(llm(toy, **BIG), prompts, max_tokens=34, ignore_eos=True)
    made = llm(toy, draft=toy, k=5, block_size=block_size, num_kv_blocks=512 // block_size)
    assert ids(made, prompts, max_tokens=34, ignore_eos=True) == expected


def test_63_rejected_drafts_never_reach_the_prefix_cache(toy: str, toy_draft: str) -> None:
    made = llm(toy, draft=toy_draft, k=40, block_size=4)
    prompt = _prompt(10)
    first = ids(made, [prompt], max_tokens=60, ignore_eos=True)[0]
    cold = llm(toy, **BIG)
    for cut in (1, 30):
        longer = prompt + first[:cut]
        assert ids(made, [longer], max_tokens=20, ignore_eos=True) == ids(
            cold, [longer], max_tokens=20, ignore_eos=True
        )


def test_65_acceptance_is_the_same_on_a_cached_prefix(toy: str, tmp_path: Any) -> None:
    noisy = make_toy(tmp_path / "near", seed=0, num_hidden_layers=2)
    made = llm(toy, draft=noisy, k=4)
    prompt = _prompt(120)
    params = specdec.SamplingParams(temperature=0.3, seed=1, max_tokens=60, ignore_eos=True)
    cold = made.generate([prompt], params)[0]
    warm = made.generate([prompt], params)[0]
    assert warm.stats.num_cached_tokens == 112 and cold.stats.num_cached_tokens == 0
    assert warm.stats.num_accepted_tokens == cold.stats.num_accepted_tokens
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_65_a_prefix_cached_without_a_draft_is_caught_up_with(toy: str) -> None:
    """The blocks hold the target's part only; the draft computes its own before it proposes."""
    made = llm(toy, draft=toy, k=4, max_num_batched_tokens=64)
    prompt = _prompt(150)
    off = specdec.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, speculative={"enabled": False})
    made.generate([prompt], off)
    on = specdec.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for expected_hit in (144, 144):
        [out] = made.generate([prompt], on)
        assert out.stats.num_cached_tokens == expected_hit
        assert out.stats.acceptance_rate == 1.0 and out.stats.num_draft_tokens > 20


def test_65_two_requests_share_a_prefix_while_the_draft_of_one_lags(toy: str) -> None:
    made = llm(toy, draft=toy, k=4, max_num_batched_tokens=48, max_num_seqs=8)
    prefix = _prompt(96)
    kinds: list[dict[str, Any]] = [{"speculative": {"enabled": False}}, {}, {"speculative": {"enabled": False}}, {}]
    for _ in range(2):
        outs = made.generate(
            [prefix + _prompt(5, i) for i in range(4)],
            [specdec.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **k) for k in kinds],
        )
        assert [o.stats.acceptance_rate for o in outs] == [0.0, 1.0, 0.0, 1.0]
    assert_clean(made)


def test_67_different_prompts_never_share_keys(toy: str) -> None:
    made = llm(toy)
    prompts = [[65] * 17, [66] * 17, [65] * 16 + [66]]
    apart = [ids(llm(toy, **BIG), [p], max_tokens=10)[0] for p in prompts]
    assert ids(made, prompts, max_tokens=10) == apart
    assert ids(made, prompts, max_tokens=10) == apart


def test_67_salts_keep_prefixes_apart(toy: str) -> None:
    made = llm(toy)
    engine, hits = made.engine, []
    for salt in ("a", "b", "a"):
        request = engine.make_request(f"salt-{len(hits)}", _prompt(40), specdec.SamplingParams(max_tokens=1))
        request.cache_salt = salt
        engine.add(request)
        while engine.has_work:
            engine.step()
        hits.append(request.stats.num_cached_tokens)
    assert hits == [0, 0, 32]


def test_77_an_impossible_request_fails_alone(toy: str) -> None:
    made = llm(toy, num_kv_blocks=24)
    engine = made.engine
    params = specdec.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    running = [engine.make_request(f"r{i}", _prompt(8, i), params) for i in range(8)]
    for request in running:
        engine.add(request)
    engine.step()
    with pytest.raises(specdec.ContextLengthError):
        engine.make_request("huge", _prompt(400), params)
    while engine.has_work:
        engine.step()
    assert all(r.num_output_tokens == 12 for r in running)
    assert_clean(made)


def test_79_steady_arrivals_do_not_starve_a_running_decode(toy: str) -> None:
    made = llm(toy, draft="ngram", k=4, max_num_batched_tokens=64)
    engine = made.engine
    long = engine.make_request("long", _prompt(10), specdec.SamplingParams(max_tokens=40, ignore_eos=True))
    engine.add(long)
    engine.step()
    for step in range(39):
        params = specdec.SamplingParams(max_tokens=1)
        engine.add(engine.make_request(f"new-{step}", _prompt(200, step), params))
        before = long.num_output_tokens
        engine.step()
        assert long.num_output_tokens > before or long.is_finished
    while engine.has_work:
        engine.step()
    assert_clean(made)


def test_81_a_short_prompt_does_not_wait_for_long_ones(toy: str) -> None:
    made = llm(toy, max_num_batched_tokens=32, max_num_seqs=8)
    engine = made.engine
    params = specdec.SamplingParams(temperature=0, max_tokens=2)
    requests = [engine.make_request(n, _prompt(size), params) for n, size in (("a", 400), ("b", 400), ("short", 10))]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    assert requests[2].num_output_tokens > 0 and not requests[0].num_output_tokens
    while engine.has_work:
        engine.step()
    assert_clean(made)


GRID_PROPOSERS = {"plain": (None, None), "ngram": ("ngram", 4), "self": ("self", 4), "stranger": ("stranger", 3)}


def _grid_case(toy: str, toy_draft: str, proposer: str, options: dict[str, Any]) -> None:
    draft, k = GRID_PROPOSERS[proposer]
    draft = {"self": toy, "stranger": toy_draft}.get(draft or "", draft)
    prompts = [_prompt(n, n) for n in (5, 32, 33, 70)] + [[*_prompt(64, 64), 1, 2]]
    expected = [ids(llm(toy, **BIG), [p], max_tokens=20, ignore_eos=True)[0] for p in prompts]
    seeded = [ids(llm(toy, **BIG), [p], max_tokens=20, ignore_eos=True, temperature=1, seed=2)[0] for p in prompts]
    made = llm(toy, draft=draft, k=k, **options)
    for _ in range(2):  # the second round meets its own prefixes
        assert ids(made, prompts, max_tokens=20, ignore_eos=True) == expected, options
        assert ids(made, prompts, max_tokens=20, ignore_eos=True, temperature=1, seed=2) == seeded, options


@pytest.mark.parametrize("proposer", ["self", "stranger"])  # the slow grid has them all
def test_pools_caches_and_blocks_do_not_show(toy: str, toy_draft: str, proposer: str) -> None:
    _grid_case(toy, toy_draft, proposer, {"block_size": 8, "num_kv_blocks": 17})


@pytest.mark.slow
@pytest.mark.parametrize("proposer", list(GRID_PROPOSERS))
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tokens", [192, 4096])
def test_pools_caches_and_blocks_do_not_show_on_the_whole_grid(
    toy: str, toy_draft: str, proposer: str, block_size: int, cached: bool, tokens: int
) -> None:
    options = {"block_size": block_size, "enable_prefix_caching": cached, "num_kv_blocks": tokens // block_size}
    _grid_case(toy, toy_draft, proposer, options)
