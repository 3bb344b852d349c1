"""An idle engine waits for company only where company comes."""

from __future__ import annotations

import time

from specdec.async_engine import AsyncEngine
from specdec.queue_delay import QueueDelay
from tests.server.scripted import scripted_engine
from tests.server.test_async_engine import collect, submit, with_engine


def test_it_never_waits_longer_than_the_limit_or_for_arrivals_that_are_rarer() -> None:
    delay = QueueDelay(0.010)
    for i in range(50):
        delay.note_arrival(i * 0.002)
        assert delay.left(i * 0.002) <= 0.010
    assert delay.left(49 * 0.002) == 0  # the first of them waits since 98 ms
    delay.note_start()
    rare = QueueDelay(0.010)
    for i in range(5):
        rare.note_start()
        rare.note_arrival(float(i))
        assert rare.left(float(i)) == 0


def test_requests_that_come_one_after_the_other_start_together() -> None:
    engine = scripted_engine()
    first_steps: list[int] = []

    async def use(async_engine: AsyncEngine) -> None:
        async_engine.queue_delay = QueueDelay(0.5)
        now = time.monotonic()
        for i in range(3):  # they have been coming every 100 ms
            async_engine.queue_delay.note_arrival(now - 0.3 + 0.1 * i)
        async_engine.queue_delay.note_start()
        async_engine.on_step = lambda report: first_steps.append(report.num_rows)
        streams = [submit(async_engine, max_tokens=2)]
        time.sleep(0.05)  # the engine is free and would have started
        streams.append(submit(async_engine, max_tokens=2))
        for stream in streams:
            await collect(stream)

    with_engine(engine, use)
    assert first_steps[0] == 2
