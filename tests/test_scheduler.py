"""The batcher: fair, never over its budget, never stuck, and it leaks nothing. No torch here."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.batch import Batch, Plan, Verdict
from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig
from specdec.request import FinishReason, Request
from specdec.sampling_params import SamplingParams
from specdec.scheduler import JOINS_PER_PROMOTION, Emitted, Scheduler, share_evenly, share_prompts


def _scheduler(num_blocks: int = 64, block_size: int = 4, **limits: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits}),
        BlockPool(num_blocks, block_size),
    )


def _request(name: str, num_prompt: int, max_output: int = 8) -> Request:
    return Request(name, list(range(num_prompt)), SamplingParams(), max_output_tokens=max_output)


def _commit(scheduler: Scheduler, plan: Plan, accept: int = 0, drafts: int = 0) -> list[Emitted]:
    """Pretend the target agreed to `accept` of `drafts` drafts in each row."""
    batch = Batch(tuple(row.with_drafts((7,) * min(drafts, row.max_drafts)) for row in plan))
    ids = tuple((7,) * (min(accept, len(r.draft_token_ids)) + 1) if r.chooses else () for r in batch)
    return scheduler.commit(batch, Verdict(ids, (False,) * len(batch)))


def test_running_decodes_keep_their_token_while_a_long_prompt_comes_in() -> None:
    s = _scheduler(num_blocks=400)
    s.add(_request("short", 3, 100))
    _commit(s, s.schedule(lambda r: 0))
    s.add(_request("long", 1000, 4))
    for _ in range(30):
        plan = s.schedule(lambda r: 0)
        assert plan.rows[0].request.request_id == "short" and plan.rows[0].num_base == 1
        assert plan.rows[1].num_base == 31
        _commit(s, plan)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    s = _scheduler(num_blocks=1100)
    s.add(_request("long", 4000))
    s.add(_request("short", 10))
    plan = s.schedule(lambda r: 0)
    assert [(r.request.request_id, r.num_base) for r in plan] == [("long", 22), ("short", 10)]
    assert [e.request.request_id for e in _commit(s, plan) if e.token_ids] == ["short"]


def test_drafts_and_prompts_share_what_is_left() -> None:
    s = _scheduler(num_blocks=400)
    for i in range(4):
        s.add(_request(f"r{i}", 2, 50))
    _commit(s, s.schedule(lambda r: 0))
    s.add(_request("long", 500))
    plan = s.schedule(lambda r: 16)
    drafts = sum(r.max_drafts for r in plan)
    chunk = next(r.num_base for r in plan if r.request.request_id == "long")
    assert chunk == drafts == 14 and drafts + chunk + 4 == 32


def test_a_request_leaves_in_the_step_that_ends_it_and_another_joins_in_the_next() -> None:
    s = _scheduler(max_num_seqs=1)
    s.add(_request("first", 3, 1))
    s.add(_request("second", 3, 1))
    plan = s.schedule(lambda r: 0)
    assert [r.request.request_id for r in plan] == ["first"]
    [done] = _commit(s, plan)
    assert done.request.finish_reason is FinishReason.LENGTH
    assert [r.request.request_id for r in s.schedule(lambda r: 0)] == ["second"]


def test_rejected_drafts_give_their_blocks_back_in_the_same_commit() -> None:
    s = _scheduler()
    s.add(_request("r", 4, 40))
    _commit(s, s.schedule(lambda r: 0))
    held = len(s.running[0].block_table)
    plan = s.schedule(lambda r: 8)
    assert len(s.running[0].block_table) > held
    _commit(s, plan, accept=0, drafts=8)
    assert len(s.running[0].block_table) == 2 and s.running[0].num_computed_tokens == 5
    s.check_integrity()


def test_the_last_to_arrive_is_preempted_and_resumes_with_its_tokens() -> None:
    s = _scheduler(num_blocks=8)
    s.add(_request("old", 8, 16))
    s.add(_request("new", 8, 16))
    seen: dict[str, int] = {}
    for _ in range(200):
        plan = s.schedule(lambda r: 0)
        assert plan.rows or not s.has_work
        for e in _commit(s, plan):
            seen[e.request.request_id] = seen.get(e.request.request_id, 0) + len(e.token_ids)
        s.check_integrity()
        if not s.has_work:
            break
    assert seen == {"old": 16, "new": 16} and s.num_preemptions >= 1


def test_only_committed_blocks_are_found_by_others() -> None:
    s = _scheduler()
    s.add(_request("r", 3, 40))
    _commit(s, s.schedule(lambda r: 0))
    _commit(s, s.schedule(lambda r: 16), accept=0, drafts=16)  # drafts filled blocks, all rejected
    cached = s.pool.match([0, 1, 2, 7, 7, 7, 7, 7, 7, 7], s.pool.root_hash(None))[0]
    assert len(cached) == 1  # only [0, 1, 2, 7] was ever committed in full


@given(st.lists(st.integers(0, 50)), st.integers(0, 200))
def test_shares_never_exceed_wishes_or_budget(wanted: list[int], budget: int) -> None:
    for share in (share_evenly, share_prompts):
        granted = share(wanted, budget)
        assert all(0 <= g <= w for g, w in zip(granted, wanted, strict=True))
        assert sum(granted) == min(budget, sum(wanted))


class Batching(RuleBasedStateMachine):
    """Random arrivals, lengths, acceptances, faults and aborts against the invariants."""

    @initialize(
        blocks=st.integers(12, 60), size=st.sampled_from([1, 4, 16]), seqs=st.integers(1, 6), seed=st.integers(0, 999)
    )
    def begin(self, blocks: int, size: int, seqs: int, seed: int) -> None:
        self.s = _scheduler(blocks, size, max_num_seqs=seqs, max_num_batched_tokens=max(seqs, 7))
        self.random = random.Random(seed)
        self.count = 0

    @rule(prompt=st.integers(1, 40), output=st.integers(1, 30))
    def arrive(self, prompt: int, output: int) -> None:
        capacity = self.s.pool.num_blocks * self.s.pool.block_size
        if prompt + output - 1 <= capacity:
            self.count += 1
            self.s.add(_request(str(self.count), prompt, output))

    @precondition(lambda self: self.s.has_work)
    @rule()
    def abort(self) -> None:
        victim = self.random.choice(self.s.waiting + self.s.running)
        assert self.s.abort(victim.request_id) is victim and victim.finish_reason is FinishReason.ABORT
        assert self.s.abort(victim.request_id) is None

    @precondition(lambda self: self.s.has_work)
    @rule(budget=st.integers(0, 8), fails=st.booleans())
    def step(self, budget: int, fails: bool) -> None:
        plan = self.s.schedule(lambda r: budget)
        assert plan.rows, "there is work but no row"
        assert sum(r.num_base + r.max_drafts for r in plan) <= self.s.config.max_num_batched_tokens
        size = self.s.pool.block_size
        for row in plan:
            assert row.end + row.max_drafts <= len(row.request.block_table) * size
            assert row.max_drafts <= max(row.request.max_output_tokens - row.request.num_output_tokens - 1, 0)
        batch = Batch(tuple(r.with_drafts((7,) * self.random.randint(0, r.max_drafts)) for r in plan))
        ids = tuple((7,) * (self.random.randint(0, len(r.draft_token_ids)) + 1) if r.chooses else () for r in batch)
        failed = tuple(fails and self.random.random() < 0.2 and r.chooses for r in batch)
        ids = tuple(i[:-1] if is_failed else i for i, is_failed in zip(ids, failed, strict=True))
        for e in self.s.commit(batch, Verdict(ids, failed)):
            assert 0 <= e.num_accepted <= e.num_drafted
            assert e.request.num_output_tokens <= e.request.max_output_tokens

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "s"):
            self.s.check_integrity()
            assert len(self.s.running) <= self.s.config.max_num_seqs

    def teardown(self) -> None:
        for _ in range(5000):
            if not getattr(self, "s", None) or not self.s.has_work:
                break
            _commit(self.s, self.s.schedule(lambda r: 0))
        if hasattr(self, "s"):
            assert not self.s.has_work, "the queue never drained"
            assert self.s.pool.num_free_blocks == self.s.pool.num_blocks


Batching.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBatching = Batching.TestCase


@pytest.mark.slow
def test_a_hundred_thousand_steps_without_a_violation() -> None:
    machine = Batching()
    machine.begin(40, 4, 6, 1)
    chance = random.Random(2)
    for _ in range(100_000):
        if chance.random() < 0.3:
            machine.arrive(chance.randint(1, 40), chance.randint(1, 30))
        if machine.s.has_work:
            machine.abort() if chance.random() < 0.02 else machine.step(chance.randint(0, 8), chance.random() < 0.1)
        machine.nothing_leaks()
    machine.teardown()


def test_choices_wait_for_the_first_one_and_share_its_blocks() -> None:
    s = _scheduler(num_blocks=40)
    first, second, other = (_request(name, 41, 4) for name in ("first", "second", "other"))
    second.leader = first
    for request in (first, second):
        s.add(request)
    other.token_ids = [9] * 10
    other.num_prompt_tokens = 10
    s.add(other)
    plan = s.schedule(lambda r: 0)
    assert {r.request.request_id for r in plan} == {"first", "other"}  # the one behind is not held up
    _commit(s, plan)
    _commit(s, s.schedule(lambda r: 0))
    s.schedule(lambda r: 0)
    assert second.block_table[:10] == first.block_table[:10] and second.stats.num_cached_tokens == 40
    s.abort("first")
    s.check_integrity()


def test_a_choice_whose_leader_was_aborted_goes_on() -> None:
    s = _scheduler()
    first, second = _request("first", 20), _request("second", 20)
    second.leader = first
    s.add(first)
    s.add(second)
    s.abort("first")
    assert [r.request.request_id for r in s.schedule(lambda r: 0)] == ["second"]


def test_low_priority_waits_and_is_preempted_first() -> None:
    s = _scheduler(num_blocks=8, max_num_seqs=2)
    important, late, background = (_request(name, 8, 20) for name in ("important", "late", "background"))
    background.priority, late.priority, important.priority = 5, 1, 0
    for request in (background, late, important):
        s.add(request)
    assert [r.request.request_id for r in s.schedule(lambda r: 0)] == ["important", "late"]
    for _ in range(20):
        plan = s.schedule(lambda r: 0)
        if plan.left:
            break
        _commit(s, plan)
    assert plan.left == (late,) and s.waiting == [late, background]


def test_a_victim_that_owes_one_token_is_not_run_in_the_step_that_preempts_it() -> None:
    """Many one-token prompts, mixed priorities and a small pool, against what the plan may hold."""
    for seed in range(400):
        chance = random.Random(seed)
        s = _scheduler(chance.randint(24, 40), 1, max_num_seqs=8, max_num_batched_tokens=chance.randint(8, 12))
        for name in range(14):
            request = _request(str(name), 1, chance.randint(4, 18))
            request.priority = chance.randint(0, 3)
            s.add(request)
        while s.has_work:
            plan = s.schedule(lambda r: 4)
            assert all(any(row.request is r for r in s.running) for row in plan), seed
            _commit(s, plan, accept=4, drafts=4)
            s.check_integrity()


def test_a_steady_stream_of_better_classes_starves_nobody() -> None:
    s = _scheduler(max_num_seqs=1)
    patient = _request("patient", 3, 1)
    patient.priority = 1000
    s.add(patient)
    num_overtakers = 0
    while not patient.is_finished:
        s.add(_request(f"better-{num_overtakers}", 3, 1))
        num_overtakers += 1
        _commit(s, s.schedule(lambda r: 0))
        assert num_overtakers <= JOINS_PER_PROMOTION + 1
    assert num_overtakers > 2  # better classes do go first
