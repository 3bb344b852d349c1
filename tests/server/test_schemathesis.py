"""The server against its own OpenAPI document, by schemathesis: whatever is generated, nothing breaks.

A sample runs always; the large run with `pytest -m slow tests/server/test_schemathesis.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from specdec.async_engine import AsyncEngine
from specdec.server.app import create_app
from tests.server.scripted import scripted_engine
from tests.server.support import assert_at_rest


def attack(num_examples: int) -> set[tuple[str, int]]:
    """Send generated requests to every operation; return which statuses each path answered."""
    engine = scripted_engine(max_model_len=64)
    async_engine = AsyncEngine(engine)
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(async_engine, "toy"))
    seen: set[tuple[str, int]] = set()

    def send(case: Any) -> None:
        answer = case.call_and_validate(checks=[not_a_server_error])
        assert answer.elapsed < 10
        seen.add((case.path, answer.status_code))

    phases = (Phase.explicit, Phase.generate)
    for result in schema.get_all_operations():
        limits = settings(
            max_examples=num_examples,
            deadline=None,
            phases=phases,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        limits(given(case=result.ok().as_strategy())(send))()
    async_engine.close()
    assert_at_rest(engine)
    return seen


def test_a_sample_of_generated_requests_breaks_nothing() -> None:
    seen = attack(3)
    paths = {path for path, _ in seen}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/metrics"} <= paths
    assert ("/v1/completions", 200) in seen and any(status == 400 for _, status in seen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_generated_requests_break_nothing() -> None:
    assert len(attack(400)) > 10
