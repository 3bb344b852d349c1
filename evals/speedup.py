"""Speed-up: does speculation pay on this machine, for these prompts, and is the text still the same?

    python -m evals.speedup --draft PATH --workloads chat,code --concurrency 1,8 --k 2,4

It composes workloads, systems and the comparison, and prints what came out. The exit status is 1
where any system's text differs from plain decoding beyond what floating point allows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evals import baselines, explain, grid, peers, results, speedup_table, workloads
from evals.compare import Comparison
from evals.equality import Judge
from evals.flags import above, numbers, whole, words
from evals.load import Job, System
from evals.runs import KIND, Run, summarise
from evals.systems import METHODS, Setup, encode, engine_systems, load
from specdec import LLM
from specdec.models.sources import resolve


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; lists are separated by commas."""
    parser = results.parser("evals.speedup", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="alias, directory or hub id")
    add("--draft", help="a second model or a head over features, for method draft")
    add("--workloads", type=words, default=None, help="of " + ",".join((*workloads.NAMES, *grid.WORKLOADS[2:])))
    add("--prompts", type=Path, help="JSONL in Spec-Bench, HumanEval, ShareGPT or plain form, instead of --workloads")
    add("--num-prompts", type=whole(1), help="of each workload; default: all")
    add(
        "--max-tokens",
        type=whole(1),
        default=64,
        help="of an answer; with --grid the mean, half of it to one and a half",
    )
    add("--concurrency", type=numbers, default=None, help="default: 1,8")
    add("--k", type=numbers, default=None, help="draft lengths; default: 2,4")
    add("--adaptive", action="store_true", help="measure the controller that adapts the length as well")
    add("--grid", action="store_true", help="hold it against every fixed length over a grid of workloads and loads")
    add("--methods", type=words, default=None, help="of " + ",".join(METHODS) + "; plain is always measured")
    add(
        "--baselines",
        type=words,
        default=[],
        help="of " + ",".join(baselines.NAMES) + "; all but batching at concurrency 1",
    )
    add("--peer", action="append", default=[], metavar="NAME=URL", help="an OpenAI-compatible server; may be repeated")
    add("--temperature", type=float, default=0.0)
    add("--dtype", default="auto")
    add("--repeats", type=whole(1), help="default: 3")
    add(
        "--minutes",
        type=above(0),
        help="repeat everything while this time lasts, twice at least, instead of --repeats",
    )
    add("--seed", type=int, default=0)
    add(
        "--traces",
        type=Path,
        help="a new directory for the adaptive controllers' decisions; says how calibrated they are",
    )
    add("--resume", type=Path, help="file of an interrupted run; what it holds with these settings is kept")
    args = parser.parse_args(argv)
    if args.repeats is not None and args.minutes is not None:
        parser.error(f"--repeats is {args.repeats} and --minutes is {args.minutes:g}; give one of them")
    _fill_in(args)
    _check(parser, args)
    return args


def _fill_in(args: argparse.Namespace) -> None:
    """Defaults, which are others for the grid."""
    args.adaptive |= args.grid
    if args.repeats is None:
        args.repeats = 3
    if args.workloads is None:
        args.workloads = list(grid.WORKLOADS if args.grid else workloads.NAMES)
    if args.concurrency is None:
        args.concurrency = list(grid.CONCURRENCY) if args.grid else [1, 8]
    if args.k is None:
        args.k = list(grid.KS) if args.grid else [2, 4]


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.methods is None:
        args.methods = ["ngram", "draft"] if args.draft else ["ngram"]
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        parser.error(f"--methods names {', '.join(sorted(unknown))}; known are {', '.join(METHODS)}")
    if "draft" in args.methods and not args.draft:
        parser.error("method draft needs --draft PATH")
    for name in ("k", "concurrency"):
        if min(getattr(args, name), default=0) < 1:
            parser.error(f"--{name} is {','.join(map(str, getattr(args, name)))}; all of it must be at least 1")
    if args.grid and args.num_prompts is not None and args.num_prompts < max(args.concurrency):
        most = max(args.concurrency)
        parser.error(f"--num-prompts is {args.num_prompts}; --grid at --concurrency {most} needs at least {most}")
    if args.out is not None and args.out.is_dir():
        parser.error(f"--out is {args.out}, a directory; it must be a file")
    if set(args.baselines) - set(baselines.NAMES):
        parser.error(f"--baselines is {','.join(args.baselines)}; known are {', '.join(baselines.NAMES)}")
    if args.baselines and args.temperature > 0:
        parser.error("--baselines are greedy, since their sampled text has other noise than ours; use --temperature 0")
    if args.traces is not None:
        if args.traces.exists() and not args.traces.is_dir():
            parser.error(f"--traces is {args.traces}, a file; it must be a directory without traces")
        if not args.adaptive or any(args.traces.glob("*.jsonl")):
            parser.error("--traces needs --adaptive or --grid, and a directory without traces")
        try:
            args.traces.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--traces is {args.traces}, which cannot be made: {error}")
    if any("=" not in peer for peer in args.peer):
        parser.error("--peer takes NAME=URL")


def main(argv: Sequence[str]) -> int:
    """Measure, save, print; 0 where all texts are equal, 130 after Ctrl-C."""
    args = parse(argv)
    try:
        earlier = read_earlier(args.resume)
        llms, jobs = build(args, read_workloads(args))
    except (OSError, ValueError) as error:
        print(f"evals.speedup: {error}", file=sys.stderr)
        return 2
    comparison, path = prepare(args, argv, llms, earlier)
    is_interrupted = False
    try:
        measure(args, jobs, comparison)
    except KeyboardInterrupt:
        is_interrupted = True
        print(f"interrupted; continue with --resume {path}", file=sys.stderr)
    summaries = summarise(comparison.runs)
    print(speedup_table.render(summaries))
    if args.grid:
        print("\n" + grid.report(comparison.runs))
    if args.traces is not None:
        print("\n" + calibration(args.traces))
    print(f"\nJSON lines: {path}")
    if is_interrupted:
        return 130
    return 0 if all(summary.is_equal for summary in summaries) else 1


def calibration(traces: Path) -> str:
    """How far the controllers' beliefs were from what came of them, a line a method."""
    return "\n".join(
        f"{path.stem}: {explain.calibration(explain.beliefs(explain.read(path)))}; python -m evals.explain {path}"
        for path in sorted(traces.glob("*.jsonl"))
        if path.stat().st_size
    )


def read_workloads(args: argparse.Namespace) -> dict[str, list[workloads.Prompt]]:
    """Prompts by workload, unique within it."""
    if args.prompts is not None:
        found = {args.prompts.stem: workloads.load_file(args.prompts)}
        if not found[args.prompts.stem]:
            raise ValueError(f"--prompts is {args.prompts}, which holds no prompt; it needs at least one")
    else:
        found = {name: grid.prompts(name) for name in args.workloads}
    if args.grid and args.num_prompts is None:
        return {name: grid.enough(prompts, max(map(grid.jobs_at, args.concurrency))) for name, prompts in found.items()}
    return {name: workloads.take(prompts, args.num_prompts) for name, prompts in found.items()}


def build(
    args: argparse.Namespace, prompts: dict[str, list[workloads.Prompt]]
) -> tuple[dict[str, LLM], dict[str, list[Job]]]:
    """Load each method's engine, and encode the prompts once for all of them."""
    methods = ["plain", *(m for m in args.methods if m != "plain")]
    setup = Setup(
        target=args.target,
        draft=args.draft,
        dtype=args.dtype,
        ks=tuple(args.k),
        max_concurrency=max(args.concurrency),
        max_tokens=args.max_tokens * 3 // 2 if args.grid else args.max_tokens,
        adaptive=args.adaptive,
        traces=args.traces,
    )
    llms: dict[str, LLM] = {}
    encoded: dict[str, list[Job]] = {}
    longest = max(len(p.text.encode()) for own in prompts.values() for p in own) + 256  # more bytes than tokens
    for method in tqdm(methods, desc="loading", unit="engine", disable=None):
        llms[method] = load(setup, method, longest)
    for name, own in prompts.items():
        jobs = [
            Job(
                p,
                encode(llms["plain"], p),
                grid.tokens_of(i, args.max_tokens) if args.grid else args.max_tokens,
                grid.TEMPERATURE.get(name, args.temperature),
                args.seed + i,
            )
            for i, p in enumerate(own)
        ]
        encoded[name] = fitting(name, jobs, llms["plain"].engine.max_model_len)
    return llms, encoded


def fitting(name: str, jobs: Sequence[Job], max_model_len: int) -> list[Job]:
    """The jobs whose prompt and answer fit the model; the others are left out of every system, and counted aloud."""
    kept = [job for job in jobs if len(job.token_ids) + job.max_tokens <= max_model_len]
    if len(kept) < len(jobs):
        left_out = len(jobs) - len(kept)
        print(f"{name}: {left_out} of {len(jobs)} prompts do not fit {max_model_len} tokens", file=sys.stderr)
    if not kept:
        raise ValueError(f"no prompt of {name} fits {max_model_len} tokens with --max-tokens {jobs[0].max_tokens}")
    return kept


def read_earlier(path: Path | None) -> list[dict[str, Any]]:
    """Records of the run to resume; none without one. A file that holds none, and is not empty, is another's."""
    if path is None:
        return []
    try:
        records = list(results.read(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume is {path}, which cannot be read: {error}") from error
    found = [r for r in records if isinstance(r, dict) and r.get("kind") == KIND and "settings" in r]
    if not found and path.stat().st_size:
        raise ValueError(f"--resume is {path}, which holds no run of evals.speedup")
    return found


def prepare(
    args: argparse.Namespace, argv: Sequence[str], llms: dict[str, LLM], records: Sequence[dict[str, Any]]
) -> tuple[Comparison, Path]:
    """The comparison, its file, and what an interrupted run left in it."""
    target = llms["plain"].engine.target.model
    dtype = str(target.dtype).removeprefix("torch.")
    settings = {
        "target": args.target,
        "draft": args.draft,
        "dtype": dtype,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "num_prompts": args.num_prompts,
        "seed": args.seed,
    }
    path = args.resume or args.out or results.default_path("evals.speedup")
    done = []
    if args.resume is not None:
        done = [Run.from_record(record) for record in records if record["settings"] == settings]
        print(f"{path}: {len(done)} of {len(records)} runs have these settings and are kept", file=sys.stderr)
    file = results.ResultFile(path, results.describe("evals.speedup", argv, args.seed))

    def save(run: Run) -> None:
        file.write(KIND, {"settings": settings, **run.to_record()})

    return Comparison(all_systems(args, llms), Judge(target.path, dtype), decoder(llms["plain"]), save, done), path


def decoder(llm: LLM) -> Callable[[Sequence[int]], str]:
    """Ids to text, special tokens left out as servers do."""
    assert llm.tokenizer is not None  # prompts were encoded with it
    return llm.tokenizer.decode


def all_systems(args: argparse.Namespace, llms: dict[str, LLM]) -> list[System]:
    """Ours, transformers' and the peers'."""
    systems: list[System] = [*engine_systems(llms, args.k, adaptive=args.adaptive)]
    model = llms["plain"].engine.target.model
    if args.baselines:
        draft = None if args.draft is None else resolve(args.draft)
        systems += baselines.load(args.baselines, model.path, draft, model.dtype, model.eos_token_ids)
    for name, url in (peer.split("=", 1) for peer in args.peer):
        systems.append(peers.PeerSystem(name, peers.connect(url)))
    return systems


def measure(args: argparse.Namespace, jobs: dict[str, list[Job]], comparison: Comparison) -> None:
    """Every workload at every concurrency."""
    if args.minutes is not None:
        measure_for(args, jobs, comparison)
        return
    total = len(jobs) * args.repeats * sum(len(comparison.systems_at(c)) for c in args.concurrency)
    with tqdm(total=total, desc="measuring", unit="run", disable=None) as bar:
        for name, own in jobs.items():
            for concurrency in args.concurrency:
                chosen = own[: grid.jobs_at(concurrency)] if args.grid else own
                comparison.measure(name, chosen, concurrency, range(args.repeats), bar)


def measure_for(args: argparse.Namespace, jobs: dict[str, list[Job]], comparison: Comparison) -> None:
    """Repeat everything while the next repetition, as long as the longest so far, still fits the time."""
    began, repeats, longest = time.monotonic(), 0, 0.0
    per_repeat = len(jobs) * sum(len(comparison.systems_at(c)) for c in args.concurrency)
    with tqdm(desc="measuring", unit="run", disable=None, total=2 * per_repeat) as bar:
        while repeats < 2 or time.monotonic() - began + longest < 60 * args.minutes:
            repeats += 1
            bar.total = max(2, repeats) * per_repeat
            before = time.monotonic()
            for name, own in jobs.items():
                for concurrency in args.concurrency:
                    chosen = own[: grid.jobs_at(concurrency)] if args.grid else own
                    comparison.measure(name, chosen, concurrency, range(repeats - 1, repeats), bar)
            longest = max(longest, time.monotonic() - before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
