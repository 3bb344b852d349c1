"""What may be compiled: nothing with "off", our kernels with "auto", decoder layers too with "max"; the same ids."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec.config import COMPILES
from specdec.errors import InvalidRequestError
from specdec.kernels import dispatch, native
from specdec.llm import engine_config
from specdec.models import compiled
from specdec.models.forward_batch import Segment
from specdec.models.runner import ModelRunner
from tests import engines
from tests.toys import make_toy

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9, 8, 7], list(range(60, 100)), [5] * 20]
needs_compiler = pytest.mark.skipif(not native.enabled(), reason="no C++ compiler")

_WITHOUT_COMPILER = """
import logging, sys
logging.basicConfig(level="WARNING", format="LOG %(message)s")
import specdec
for mode in sys.argv[2:]:
    made = specdec.LLM(sys.argv[1], "ngram", dtype="float32", num_kv_blocks=64, compile=mode)
    [out] = made.generate([[1, 2, 3, 4, 1, 2, 3]], specdec.SamplingParams(temperature=0, max_tokens=12))
    print("LOG", mode, out.outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A family without a native forward."""
    return make_toy(tmp_path_factory.mktemp("toys") / "neox", "gpt_neox", seed=3)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another, with layers of two kinds: twice as many graphs."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return make_toy(
        tmp_path_factory.mktemp("toys") / "gemma", "gemma3_text", seed=3, layer_types=kinds, sliding_window=6
    )


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile up to its graphs, which then run as they are: the part that can go wrong, without the long part."""
    monkeypatch.setattr(compiled, "_COMPILER", {"backend": "eager", "dynamic": True})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_values_are_checked_by_name() -> None:
    for value in ("on", None, True):
        with pytest.raises(InvalidRequestError, match="compile is .*; it must be one of off, auto, max"):
            engine_config("t", compile=value)
    assert engine_config("t").compile == "auto" and COMPILES == ("off", "auto", "max")


def test_off_builds_loads_and_calls_nothing_compiled(toy: str, neox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        path: engines.ids(engines.llm(path, None, dtype="float32"), PROMPTS, max_tokens=8) for path in (toy, neox)
    }

    def refuse() -> None:
        raise AssertionError("native code was asked for")

    monkeypatch.setattr(native, "library", refuse)
    for path, ids in expected.items():
        made = specdec.LLM(path, "ngram", dtype="float32", num_kv_blocks=256, compile="off")
        found: list[list[list[int]]] = []
        stepping = threading.Thread(target=lambda: found.append(engines.ids(made, PROMPTS, max_tokens=8)))  # noqa: B023
        stepping.start()  # a server steps on another thread than the one that loads
        stepping.join()
        assert found == [ids]


def test_twins_are_asked_for_in_one_thread_only() -> None:
    seen: list[str] = []
    with dispatch.twins_only():
        assert dispatch.mode() == "reference"
        other = threading.Thread(target=lambda: seen.append(dispatch.mode()))
        other.start()
        other.join()
    assert seen == [dispatch.mode()]


def test_off_refuses_what_only_kernels_can_do(toy: str) -> None:
    with pytest.raises(InvalidRequestError, match="--compile off"):
        specdec.LLM(toy, None, dtype="float32", quantization="int8", compile="off")


@needs_compiler
def test_without_a_compiler_one_line_is_logged_and_the_ids_are_the_same(toy: str, tmp_path: Path) -> None:
    environment = {
        **os.environ, "SPECDEC_CACHE": str(tmp_path / "cache"), "CXX": "", "PATH": str(tmp_path),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = [sys.executable, "-c", _WITHOUT_COMPILER, toy, *COMPILES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [ids] = engines.ids(engines.llm(toy, None, dtype="float32"), PROMPTS[:1], max_tokens=12)
    assert done.stdout.splitlines() == [f"LOG {mode} {ids}" for mode in COMPILES]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("LOG")]
    assert "no C++ compiler was found" in line
    assert not (tmp_path / "cache" / "native").exists()


def _scores(runner: ModelRunner, lengths: list[int]) -> torch.Tensor:
    """Rows of these lengths from position 0, every token scored."""
    each = -(-max(lengths) // runner.cache.block_size)
    return runner.forward(
        runner.pack([Segment(list(range(n)), 0, range(r * each, (r + 1) * each), n) for r, n in enumerate(lengths)])
    )


@needs_compiler
def test_layers_are_compiled_for_one_token_and_for_any_number(gemma: str, traced: None) -> None:
    plain = engines.llm(gemma, None, dtype="float32").engine.target
    runner = specdec.LLM(gemma, None, dtype="float32", num_kv_blocks=256, compile="max").engine.target
    assert runner.is_compiled and not plain.is_compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([1], [2], [7], [1] * 9, [33, 1, 5], [1] * 64):
            assert torch.equal(_scores(runner, lengths), _scores(plain, lengths))


@needs_compiler
def test_features_leave_compiled_layers_too(neox: str, traced: None) -> None:
    runners = [specdec.LLM(neox, None, dtype="float32", num_kv_blocks=256).engine.target for _ in range(2)]
    for runner in runners:
        runner.capture((0, 2, 3))
    assert compiled.compile_layers(runners[1])
    for lengths in ([1], [4, 1]):
        _ = [_scores(runner, lengths) for runner in runners]
        features = [runner.features for runner in runners]
        assert features[0] is not None and features[1] is not None and torch.equal(features[0], features[1])


def _refuse(*_: Any) -> None:
    raise RuntimeError("out of order")


def _lie(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return lambda *arguments: tuple(2 * out for out in graph(*arguments))


@needs_compiler
@pytest.mark.parametrize(("backend", "reason"), [(_refuse, "out of order"), (_lie, "compiled layers differ")])
def test_a_compiler_that_fails_or_lies_leaves_the_layers_as_they_were(
    backend: Any, reason: str, neox: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_COMPILER", {"backend": backend, "dynamic": True})
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "specdec"):
        made = specdec.LLM(neox, None, dtype="float32", num_kv_blocks=256, compile="max")
    [line] = [record.getMessage() for record in caplog.records if record.name == "specdec"]
    assert reason in line and not made.engine.target.is_compiled
    assert torch.equal(
        _scores(made.engine.target, [3, 1]), _scores(engines.llm(neox, None, dtype="float32").engine.target, [3, 1])
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["neox", "gemma"])
def test_compiled_layers_give_a_token_the_same_bits_in_any_company(
    family: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """pytest -m slow tests/models/test_compile.py: minutes of a C++ compiler."""
    stranger: str = request.getfixturevalue(family)
    torch._dynamo.reset()
    options: dict[str, Any] = {"dtype": dtype, "num_kv_blocks": 256, "compile": "max"}
    fixed = specdec.SpeculativeConfig(num_speculative_tokens=4, adaptive=False)
    plain = specdec.LLM(stranger, None, **options)
    assert plain.engine.target.is_compiled
    alone = [engines.ids(plain, [prompt], max_tokens=24, ignore_eos=True)[0] for prompt in PROMPTS]
    assert engines.ids(plain, PROMPTS, max_tokens=24, ignore_eos=True) == alone
    for draft in ("ngram", stranger):
        speculating = specdec.LLM(stranger, draft, speculative=fixed, **options)
        assert engines.ids(speculating, PROMPTS, max_tokens=24, ignore_eos=True) == alone
    together = _scores(plain.engine.target, [9])
    each = torch.cat([_scores(plain.engine.target, [n])[-1:] for n in range(1, 10)])
    assert torch.equal(together, each)
