"""The engine over Triton's kernels: greedy and seeded ids as with the twins, verifying drafts or not."""

import pytest

from specdec.llm import LLM
from tests.engines import Oracle, ids, llm, proposing
from tests.toys import make_toy

PROMPTS = [[1, 2, 3], list(range(40, 57))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_toy(tmp_path_factory.mktemp("toys") / "llama", num_hidden_layers=1)


def with_twins(made: LLM, monkeypatch: pytest.MonkeyPatch, **params: object) -> list[list[int]]:
    with monkeypatch.context() as environment:
        environment.setenv("SPECDEC_KERNELS", "reference")
        return ids(made, PROMPTS, **params)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_ids_are_those_of_the_twins(params: dict[str, float], target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = llm(target, None, dtype="float64", block_size=8)
    params["max_tokens"] = 6
    expected = with_twins(made, monkeypatch, **params)
    assert ids(made, PROMPTS, **params) == expected
    oracle = Oracle({tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected)})
    with proposing(made, oracle, 4):
        assert ids(made, PROMPTS, **params) == expected
    assert oracle.seen, "drafts were verified"
