"""Load over HTTP: the numbers are a client's, the sweep finds a knee that is known, and a peer's text is compared."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from evals import results, serving, speedup
from evals.arrivals import arrivals, read_gaps
from evals.http_overhead import Measured, parse, report
from evals.load import Job, Outcome
from evals.peers import Endpoint, connect
from evals.serving import Sweep, Target, open_loop, replicas
from evals.workloads import Prompt
from specdec import LLM
from tests.server.support import live_server


def test_a_level_over_http(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serving.jsonl"
    llm = LLM(toy, "ngram", dtype="float64", num_kv_blocks=256)
    with live_server(llm.engine) as url:
        common = ["--url", url, "--workloads", "math", "--num-requests", "4", "--max-tokens", "6", "--out", str(out)]
        assert serving.main([*common, "--rates", "20", "--slo-ttft", "60", "--slo-tpot", "60", "--plan", "50"]) == 0
        assert serving.main([*common, "--concurrency", "2", "--slo-ttft", "0"]) == 0
    kept, broken = results.read(out)
    assert kept["num_errors"] == 0 and kept["good"] == 1 and kept["tokens_per_second"] > 0
    assert broken["good"] == broken["goodput"] == 0  # negative control: nothing begins within no time
    printed = capsys.readouterr().out
    assert "at least 20 requests/s keep" in printed and "50 requests/s need 5 such servers" in printed
    assert "no measured load keeps" in printed


def test_a_peer_says_what_we_say(toy: str, tmp_path: Path) -> None:
    out = tmp_path / "peer.jsonl"
    llm = LLM(toy, None, dtype="float64", num_kv_blocks=256)
    arguments = ["--target", toy, "--workloads", "math", "--num-prompts", "2", "--max-tokens", "4", "--repeats", "1"]
    arguments += ["--dtype", "float64", "--concurrency", "2", "--methods", "plain", "--out", str(out)]
    with live_server(llm.engine) as url:
        assert speedup.main([*arguments, "--peer", f"twin={url}/v1"]) == 0
    plain, twin = results.read(out)
    assert (plain["system"], twin["system"]) == ("plain", "twin")
    assert twin["num_tokens"] == plain["num_tokens"] and twin["same_texts"] == 2


def test_a_dead_server_is_an_error_not_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert serving.main(["--url", url, "--out", str(tmp_path / "none.jsonl")]) == 2
        job = Job(Prompt("a", "chat"), (), 4, 0.0, 0)
        (outcome,) = open_loop(Endpoint(url, "toy"), [job], [0.0])
    assert outcome.error is not None
    assert not Target(ttft=9, tpot=9, share=1).is_kept(outcome)
    assert "does not answer" in capsys.readouterr().err


def test_an_endpoint_is_named_with_or_without_v1(toy: str) -> None:
    llm = LLM(toy, None, dtype="float64", num_kv_blocks=16)
    with live_server(llm.engine) as url:
        assert connect(url).model == connect(f"{url}/v1/").model != ""


def test_the_target_counts_waiting() -> None:
    outcome = Outcome(0.0, emissions=[(2.0, 1), (2.5, 5)])
    assert Target(ttft=2, tpot=0.1, share=1).is_kept(outcome)
    assert not Target(ttft=1.9, tpot=0.1, share=1).is_kept(outcome)
    assert not Target(ttft=2, tpot=0.09, share=1).is_kept(outcome)


@pytest.mark.parametrize(("start", "knee"), [(0.5, 11.0), (64.0, 3.0)])
def test_the_sweep_finds_the_knee(start: float, knee: float) -> None:
    """A server that bears exactly `knee`: two halvings leave a quarter of its octave."""
    sweep = Sweep(start, 2)
    while not sweep.is_over:
        sweep.tell(sweep.rate <= knee)
    assert sweep.borne is not None and sweep.broken is not None
    assert sweep.borne <= knee < sweep.broken
    assert sweep.broken - sweep.borne <= sweep.borne / 4


def test_arrivals_keep_their_rate() -> None:
    """4,000 gaps: the mean is off by 1.6 % at one standard error (bursts: 4.5 %), and the seeds are fixed."""
    for pattern in ("poisson", "bursts"):
        moments = arrivals(pattern, 4000, 10.0, 0)
        assert len(moments) == 4000 and moments == sorted(moments)
        assert 4000 / moments[-1] == pytest.approx(10, rel=0.15)
    assert arrivals("bursts", 8, 1.0, 0) == [0.0] * 8


def test_a_trace_keeps_its_rhythm_at_any_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 100}\n{"arrival": 107}\n\n101\n')
    gaps = read_gaps(trace)
    assert gaps == [1.0, 6.0]
    moments = arrivals("trace", 4001, 10.0, 0, gaps)
    assert 4000 / moments[-1] == pytest.approx(10.0)
    assert (moments[2] - moments[1]) == pytest.approx(6 * moments[1])
    for bad in ("", "5\n5\n", "noon\n", "{}\n"):
        trace.write_text(bad)
        with pytest.raises(ValueError, match="trace.jsonl"):
            read_gaps(trace)


def test_headroom_needs_more_servers() -> None:
    assert [replicas(10, 5, headroom) for headroom in (0.0, 0.3, 0.5)] == [2, 3, 4]


def test_what_http_adds_is_measured_on_equal_texts(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "overhead.jsonl"
    arguments = ["overhead", "--target", toy, "--dtype", "float64", "--streams", "3", "--max-tokens", "6"]
    assert serving.main([*arguments, "--repeats", "2", "--out", str(out)]) == 0
    measured = list(results.read(out))
    assert [one["way"] for one in measured] == ["in process", "HTTP", "HTTP", "in process"]
    assert all(one["seconds"] > 0 and one["cpu_seconds"] > 0 and one["num_steps"] >= 6 for one in measured)
    assert "6 of 6 texts" in capsys.readouterr().out


@pytest.mark.parametrize("seconds, text, rc", [(1.05, "a", 0), (1.2, "a", 1), (1.0, "b", 1)])
def test_http_that_adds_too_much_or_says_something_else_is_a_failure(seconds: float, text: str, rc: int) -> None:
    bare = Measured(
        way="in process", seconds=1.0, cpu_seconds=1.0, num_steps=9, num_tokens=9, num_chunks=0, texts=("a",)
    )
    pair = {"in process": bare, "HTTP": replace(bare, way="HTTP", seconds=seconds, texts=(text,))}
    assert report([pair] * 2, parse(["--streams", "1", "--most", "10"]), Path("none")) == rc
