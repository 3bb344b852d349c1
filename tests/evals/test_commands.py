"""The commands run from end to end on toys, and their exit status can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals import overhead, report, results, speedup
from evals.compare import Comparison


def speedup_arguments(toy: str, out: Path) -> list[str]:
    return [
        "--target", toy, "--workloads", "math", "--num-prompts", "2", "--max-tokens", "4",
        "--concurrency", "1,2", "--k", "2", "--repeats", "2", "--dtype", "float64", "--out", str(out),
    ]  # fmt: skip


def test_speedup(toy: str, toy_draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speedup.jsonl"
    assert speedup.main([*speedup_arguments(toy, out), "--draft", toy_draft]) == 0
    records = list(results.read(out))
    assert len(records) == 2 * 2 * 3  # concurrencies, repeats, systems
    assert {record["system"] for record in records} == {"plain", "ngram k=2", "draft k=2"}
    for record in records:
        assert record["is_equal"] and record["tokens_per_second"] > 0
        assert {"commit", "versions", "machine", "command", "seed", "started"} <= set(record)
        assert set(record["versions"]) == {"python", "torch", "transformers", "specdec"}
    printed = capsys.readouterr().out
    assert printed.count("equal") >= 6 and "DIFFERS" not in printed


@pytest.mark.slow
def test_transformers_own_ways_say_the_same(toy: str, toy_draft: str, tmp_path: Path) -> None:
    out = tmp_path / "speedup.jsonl"
    ways = "transformers,assisted,lookup,batching"
    arguments = [*speedup_arguments(toy, out), "--repeats", "1", "--methods", "plain", "--draft", toy_draft]
    assert speedup.main([*arguments, "--baselines", ways]) == 0
    served = {(record["system"], record["concurrency"]) for record in results.read(out)}
    alone = {"plain", "transformers", "transformers assisted", "transformers lookup", "transformers batching"}
    assert served == {(name, 1) for name in alone} | {("plain", 2), ("transformers batching", 2)}


def test_resume_measures_only_what_is_missing(toy: str, tmp_path: Path) -> None:
    out = tmp_path / "speedup.jsonl"
    arguments = speedup_arguments(toy, out)
    assert speedup.main([*arguments, "--methods", "plain"]) == 0
    lines = out.read_text().splitlines()
    assert len(lines) == 4
    assert {json.loads(line)["system"] for line in lines} == {"plain"}
    out.write_text("\n".join([*lines[:3], lines[3][:40]]))  # an interrupt cut the last line short
    assert speedup.main([*arguments, "--methods", "plain", "--resume", str(out)]) == 0
    kept = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    assert [(r["concurrency"], r["repeat"]) for r in kept] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_an_interrupt_keeps_what_was_measured(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third run: two are on disk and in the table, and it says how to go on."""
    out, runs = tmp_path / "speedup.jsonl", Comparison._run

    def third_time(self: Comparison, *arguments: Any) -> None:
        if len(self.runs) == 2:
            raise KeyboardInterrupt
        runs(self, *arguments)

    monkeypatch.setattr(Comparison, "_run", third_time)
    assert speedup.main([*speedup_arguments(toy, out), "--methods", "plain"]) == 130
    said = capsys.readouterr()
    assert len(list(results.read(out))) == 2 and said.out.count("  plain  ") and f"--resume {out}" in said.err


def test_without_a_draft_lookup_is_measured(toy: str, tmp_path: Path) -> None:
    out = tmp_path / "speedup.jsonl"
    assert speedup.main([*speedup_arguments(toy, out), "--concurrency", "2", "--repeats", "1"]) == 0
    assert [record["system"] for record in results.read(out)] == ["plain", "ngram k=2"]


def test_too_many_prompts_end_the_command(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert speedup.main(["--target", toy, "--num-prompts", "99"]) == 2
    assert "num_prompts is 99" in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_left_out_aloud(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "short"}\n' + json.dumps({"prompt": "long " * 2000}) + "\n")
    arguments = [
        "--target",
        toy,
        "--prompts",
        str(prompts),
        "--methods",
        "plain",
        "--repeats",
        "1",
        "--dtype",
        "float64",
    ]
    arguments += ["--concurrency", "1", "--max-tokens", "4", "--out", str(tmp_path / "out.jsonl")]
    assert speedup.main(arguments) == 0
    assert "own: 1 of 2 prompts do not fit" in capsys.readouterr().err
    [record] = results.read(tmp_path / "out.jsonl")
    assert len(record["outputs"]) == 1 and record["peak_bytes"] > 2**20
    prompts.write_text(json.dumps({"prompt": "long " * 2000}))
    assert speedup.main(arguments) == 2


def test_what_sampling_costs(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a toy's forward, which costs nothing, every parameter is too dear."""
    out = tmp_path / "overhead.jsonl"
    arguments = [
        "--sampling",
        "--rows",
        "2",
        "--positions",
        "2",
        "--times",
        "1",
        "--dtype",
        "float32",
        "--out",
        str(out),
    ]
    assert overhead.main([*arguments, "--target", toy]) == 1
    assert "of the forward or more" in capsys.readouterr().err
    cases = [record["case"] for record in results.read(out)]
    assert {"temperature", "top_p=.9", "json schema"} <= set(cases)
    assert overhead.main([*arguments, "--target", "none"]) == 0


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overhead.jsonl"
    assert overhead.main(["--rows", "1,3", "--steps", "20", "--out", str(out)]) == 0
    found = list(results.read(out))
    records = {(record["rows"], record["k"]): record for record in found if record["kind"] == overhead.KIND}
    assert set(records) == {(1, 0), (1, 4), (3, 0), (3, 4)}
    assert [r["num_drafts"] for r in found if r["kind"] == overhead.OFF_KIND] == [0, 0]
    assert capsys.readouterr().out.count("a controller at zero adds") == 2
    assert records[3, 0]["tokens_per_row"] == 1
    assert records[3, 4]["tokens_per_row"] > 2  # look-up is mostly right here, or drafting is not what is timed
    assert all(record["by_stage"][stage] > 0 for record in records.values() for stage in ("schedule", "verify"))


def test_an_overrun_budget_fails(tmp_path: Path) -> None:
    """Negative control: no step takes less than a microsecond."""
    arguments = ["--rows", "1", "--k", "0", "--steps", "5", "--out", str(tmp_path / "o")]
    assert overhead.main([*arguments, "--budget", "1=1"]) == 1
    assert overhead.main([*arguments, "--budget", "1=1e9"]) == 0
    assert overhead.main([*arguments, "--off-budget=-1e9"]) == 1


def test_report(toy: str, tmp_path: Path) -> None:
    """The page fetches nothing, every plot comes out in both forms, and every number is the run's own."""
    out, directory = tmp_path / "speedup.jsonl", tmp_path / "report"
    assert speedup.main([*speedup_arguments(toy, out), "--concurrency", "2"]) == 0
    assert report.main([str(out), "--out", str(directory)]) == 0
    page, text = (directory / "report.html").read_text(), (directory / "report.md").read_text()
    assert "src=" not in page and page.count("<svg") == len(report.PLOTS)
    record = next(iter(results.read(out)))
    assert record["command"] in text and str(record["commit"]) in page
    assert all((directory / f"{name}.{form}").stat().st_size for name in report.PLOTS for form in report.FORMATS)


def test_a_time_limit_repeats_everything_twice_at_least_and_the_readme_tells_it(toy: str, tmp_path: Path) -> None:
    out, readme = tmp_path / "speedup.jsonl", tmp_path / "README.md"
    arguments = speedup_arguments(toy, out)
    at = arguments.index("--repeats")
    del arguments[at : at + 2]
    assert speedup.main([*arguments, "--concurrency", "2", "--minutes", "0.0001"]) == 0
    runs = [(record["repeat"], record["system"]) for record in results.read(out)]
    assert sorted(runs) == [(repeat, system) for repeat in (0, 1) for system in ("ngram k=2", "plain")]
    readme.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
    assert report.main([str(out), "--out", str(tmp_path / "report"), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| math | 2 | plain |" in text and "(report/speedup.svg)" in text
    with pytest.raises(ValueError, match="one part between"):
        report.into_readme("nothing", next(iter(results.read(out))), [], [])


def test_report_refuses_to_mix_settings(tmp_path: Path, toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control: two maximal lengths in one table would be a lie."""
    out = tmp_path / "mixed.jsonl"
    base = [*speedup_arguments(toy, out), "--concurrency", "2", "--repeats", "1", "--methods", "plain"]
    assert speedup.main(base) == speedup.main([*base, "--max-tokens", "3"]) == 0
    assert report.main([str(out), "--out", str(tmp_path / "report")]) == 2
    assert "differ in settings" in capsys.readouterr().err
