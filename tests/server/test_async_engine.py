"""The engine's thread: gains arrive in order, every stream ends, every abort happens once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specdec.async_engine import AsyncEngine, Gain, GainStream, StepReport
from specdec.engine import Engine
from specdec.errors import EngineDeadError
from specdec.request import FinishReason
from specdec.sampling_params import SamplingParams
from tests.server.scripted import scripted_engine
from tests.server.support import assert_at_rest, run


def submit(engine: AsyncEngine, prompt: str = "the ", **params: Any) -> GainStream:
    """Queue one prompt."""
    return engine.submit(engine.make_requests(list(prompt.encode()), SamplingParams(**params)))


async def collect(stream: GainStream) -> list[Gain]:
    """Read a stream to its end."""
    return [gain async for gain in stream]


def with_engine(engine: Engine, use: Any) -> Any:
    """Run `use(async_engine)` and check that the engine is at rest afterwards."""

    async def body() -> Any:
        async_engine = AsyncEngine(engine)
        try:
            return await use(async_engine)
        finally:
            async_engine.close()

    result = run(body())
    assert_at_rest(engine)
    return result


def test_gains_arrive_in_order_and_end_with_the_reason() -> None:
    gains = with_engine(scripted_engine(), lambda e: collect(submit(e, max_tokens=11)))
    assert bytes(t for gain in gains for t in gain.token_ids) == b"quick brown"
    assert [gain.finish_reason for gain in gains] == [None] * 10 + [FinishReason.LENGTH]


def test_an_accepted_run_is_one_gain() -> None:
    gains = with_engine(scripted_engine(num_drafts=4), lambda e: collect(submit(e, max_tokens=11)))
    assert [len(gain.token_ids) for gain in gains] == [1, 5, 5]
    assert [gain.num_accepted for gain in gains] == [0, 4, 4]


def test_choices_of_one_request_share_a_stream() -> None:
    gains = with_engine(scripted_engine(), lambda e: collect(submit(e, n=3, max_tokens=2)))
    assert sorted((g.index, len(g.token_ids)) for g in gains) == [(i, 1) for i in range(3) for _ in range(2)]


def test_closing_aborts_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, aborted = scripted_engine(seconds=0.001), []
    monkeypatch.setattr(
        engine, "abort", lambda request_id: (aborted.append(request_id), Engine.abort(engine, request_id))
    )

    async def use(async_engine: AsyncEngine) -> None:
        with submit(async_engine, max_tokens=400) as stream:
            await anext(stream)
            stream.close()
        stream.close()
        assert async_engine.num_unfinished == 0
        await collect(submit(async_engine, max_tokens=2))

    with_engine(engine, use)
    assert len(aborted) == 1


def test_a_finished_stream_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, aborted = scripted_engine(), []
    monkeypatch.setattr(engine, "abort", aborted.append)

    async def use(async_engine: AsyncEngine) -> None:
        with submit(async_engine, max_tokens=2) as stream:
            await collect(stream)

    with_engine(engine, use)
    assert aborted == []


def test_a_cancelled_reader_leaves_nothing_behind() -> None:
    async def use(async_engine: AsyncEngine) -> None:
        async def read() -> None:
            with submit(async_engine, max_tokens=400) as stream:
                await collect(stream)

        tasks = [asyncio.create_task(read()) for _ in range(20)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await collect(submit(async_engine, max_tokens=1))

    with_engine(scripted_engine(seconds=0.001, max_num_seqs=4), use)


def test_an_idle_thread_does_not_step() -> None:
    engine = scripted_engine()

    async def use(async_engine: AsyncEngine) -> None:
        await collect(submit(async_engine, max_tokens=1))
        steps = engine.num_steps
        await asyncio.sleep(0.05)
        assert engine.num_steps == steps

    with_engine(engine, use)


def _raise() -> None:
    raise RuntimeError("boom")


def test_one_fault_fails_its_rows_and_the_engine_goes_on() -> None:
    engine = scripted_engine()

    async def use(async_engine: AsyncEngine) -> None:
        engine.target.before = _raise
        last = (await collect(submit(async_engine, max_tokens=4)))[-1]
        assert last.finish_reason is FinishReason.ERROR and "boom" in (last.error or "")
        engine.target.before = lambda: None
        assert async_engine.is_alive
        assert len(await collect(submit(async_engine, max_tokens=4))) == 4

    with_engine(engine, use)


def test_two_faults_in_a_row_end_the_engine_and_every_reader_hears_of_it() -> None:
    engine = scripted_engine(max_num_seqs=1)

    async def use(async_engine: AsyncEngine) -> None:
        engine.target.before = _raise
        streams = [submit(async_engine, max_tokens=4) for _ in range(5)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert [type(r) for r in results] == [list, list] + [EngineDeadError] * 3
        assert not async_engine.is_alive
        with pytest.raises(EngineDeadError):
            submit(async_engine)

    with_engine(engine, use)


def test_a_fault_outside_a_step_ends_the_engine_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine()

    async def use(async_engine: AsyncEngine) -> None:
        monkeypatch.setattr(engine.scheduler, "schedule", lambda budget: 1 / 0)
        with pytest.raises(EngineDeadError):
            await collect(submit(async_engine))
        assert not async_engine.is_alive

    with_engine(engine, use)


def test_closing_the_engine_ends_its_streams() -> None:
    async def use(async_engine: AsyncEngine) -> None:
        stream = submit(async_engine, max_tokens=400)
        await anext(stream)
        async_engine.close()
        with pytest.raises(EngineDeadError):
            await collect(stream)

    with_engine(scripted_engine(seconds=0.001), use)


def test_a_fault_in_counting_disturbs_nobody() -> None:
    async def use(async_engine: AsyncEngine) -> None:
        async_engine.on_step = lambda report: 1 / 0
        assert len(await collect(submit(async_engine, max_tokens=3))) == 3

    with_engine(scripted_engine(), use)


def test_reports_count_rows_and_tokens() -> None:
    reports: list[StepReport] = []

    async def use(async_engine: AsyncEngine) -> None:
        async_engine.on_step = reports.append
        await collect(submit(async_engine, n=3, max_tokens=3))

    with_engine(scripted_engine(max_num_seqs=2), use)
    assert [report.num_rows for report in reports] == [2, 2, 2, 1, 1, 1]
    assert [report.num_tokens for report in reports] == [8, 2, 2, 4, 1, 1]
    assert [report.num_prompt_tokens for report in reports] == [8, 0, 0, 4, 0, 0]
    assert sum(len(gain.token_ids) for report in reports for gain in report.gains) == 9


def test_gains_carry_the_times_of_queueing_and_steps() -> None:
    async def use(async_engine: AsyncEngine) -> list[Gain]:
        first, second = (submit(async_engine, max_tokens=5) for _ in range(2))
        return await collect(first) + await collect(second)

    gains = with_engine(scripted_engine(seconds=0.005, max_num_seqs=1), use)
    assert gains[5].joined_at >= gains[4].at > gains[0].at > gains[0].joined_at
