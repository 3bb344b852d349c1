"""What HTTP adds: the same jobs through the server and by the engine in process, in turn, on one loaded model.

    python -m evals.serving overhead --target smollm2-135m --streams 64

All jobs are in flight at once. The client is another process; its time on the processor is not counted, but it
needs a core, as the event loop does. Wall time is what a user waits; processor time (engine and server together)
is what a busy machine disturbs least. It says nothing of networks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn
from tqdm import tqdm

from evals import results, workloads
from evals.flags import whole
from evals.intervals import interval
from evals.load import Job, closed_loop
from evals.systems import encode
from evals.table import render
from evals.workloads import Prompt
from specdec import LLM, SpeculativeConfig, SpeculativeParams
from specdec.async_engine import AsyncEngine
from specdec.server.app import create_app
from specdec.server.wire import wire_config

KIND = "serving.overhead"
HOST = "127.0.0.1"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way of serving all jobs once.

    cpu_seconds   processor time of this process
    num_chunks    events with text that a client saw; 0 in process
    """

    way: str
    seconds: float
    cpu_seconds: float
    num_steps: int
    num_tokens: int
    num_chunks: int
    texts: tuple[str, ...]


def in_process(llm: LLM, jobs: Sequence[Job]) -> Measured:
    """Step the engine here, without any text; the texts are made afterwards, to be compared."""
    steps, cpu, began = llm.engine.num_steps, time.process_time(), time.monotonic()
    outcomes = closed_loop(llm.engine, jobs, len(jobs), SpeculativeParams())
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    assert llm.tokenizer is not None
    return Measured(
        way="in process",
        seconds=seconds,
        cpu_seconds=cpu,
        num_steps=llm.engine.num_steps - steps,
        num_tokens=sum(outcome.num_tokens for outcome in outcomes),
        num_chunks=0,
        texts=tuple(llm.tokenizer.decode(outcome.token_ids) for outcome in outcomes),
    )


def over_http(llm: LLM, jobs: Sequence[Job]) -> Measured:
    """Serve the same engine over loopback, as `serve.py` would."""
    server = uvicorn.Server(wire_config(create_app(AsyncEngine(llm.engine), "measured"), HOST, 0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return _through(port, llm, jobs)
    finally:
        server.should_exit = True
        thread.join()


def _through(port: int, llm: LLM, jobs: Sequence[Job]) -> Measured:
    requests = json.dumps([_request(job) for job in jobs])
    client = [sys.executable, "-m", "evals.http_client", HOST, str(port)]
    steps, cpu = llm.engine.num_steps, time.process_time()
    done = subprocess.run(client, input=requests, capture_output=True, text=True, check=False, cwd=results.ROOT)
    cpu = time.process_time() - cpu
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr.strip().splitlines()[-1]}")
    said: dict[str, Any] = json.loads(done.stdout)
    assert llm.tokenizer is not None
    return Measured(
        way="HTTP",
        seconds=said["seconds"],
        cpu_seconds=cpu,
        num_steps=llm.engine.num_steps - steps,
        num_tokens=0,
        num_chunks=said["num_chunks"],
        texts=tuple(said["texts"]),
    )


def _request(job: Job) -> tuple[str, dict[str, Any]]:
    body = {"max_tokens": job.max_tokens, "temperature": job.temperature, "seed": job.seed, "stream": True}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": job.prompt.text}]}


def make_jobs(llm: LLM, args: argparse.Namespace) -> list[Job]:
    """As many chats as there are streams, all different."""
    prompts = workloads.load_named(args.workload)
    jobs = []
    for i in range(args.streams):
        prompt = Prompt(f"({i}) {prompts[i % len(prompts)].text}", args.workload)
        jobs.append(Job(prompt, encode(llm, prompt), args.max_tokens, 0.0, i))
    return jobs


def load(args: argparse.Namespace) -> LLM:
    """The model, with room for all streams at once and no cache of prefixes, so that repeats are alike."""
    blocks_each = (args.max_tokens + 1024) // BLOCK_SIZE
    return LLM(
        args.target,
        None if args.draft == "none" else args.draft,
        speculative=SpeculativeConfig(num_speculative_tokens=args.num_speculative_tokens),
        dtype=args.dtype,
        block_size=BLOCK_SIZE,
        num_kv_blocks=blocks_each * args.streams,
        max_num_seqs=args.streams,
        enable_prefix_caching=False,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.serving overhead", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--draft", default="none", help="plain decoding sends most chunks a second")
    add("--num-speculative-tokens", type=int)
    add("--dtype", default="auto")
    add("--streams", type=whole(1), default=64)
    add("--max-tokens", type=whole(1), default=64)
    add("--workload", default="chat")
    add("--repeats", type=whole(1), default=5, help="pairs; who comes first alternates")
    add("--most", type=float, help="fail where the median pair adds more than this many percent")
    add("--out", type=Path, help="JSON lines are appended here; default: a new file under results/")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, save; 1 where texts differ or --most was missed."""
    args = parse(argv)
    path = args.out or results.default_path("evals.serving")
    file = results.ResultFile(path, results.describe("evals.serving overhead", argv, 0))
    llm = load(args)
    jobs = make_jobs(llm, args)
    ways = [in_process, over_http]
    for way in ways:
        way(llm, [Job(job.prompt, job.token_ids, 4, 0.0, job.seed) for job in jobs])  # nothing is first any more
    pairs: list[dict[str, Measured]] = []
    for repeat in tqdm(range(args.repeats), unit="pair", disable=None):
        measured = [way(llm, jobs) for way in (ways if repeat % 2 == 0 else ways[::-1])]
        pairs.append({one.way: one for one in measured})
        for one in measured:
            values = asdict(one)
            del values["texts"]
            file.write(KIND, {"model": args.target, "streams": args.streams, "repeat": repeat, **values})
    return report(pairs, args, path)


def report(pairs: Sequence[dict[str, Measured]], args: argparse.Namespace, path: Path) -> int:
    """One line a pair, then the ratios."""
    rows = []
    for pair in pairs:
        bare, served = pair["in process"], pair["HTTP"]
        numbers = (bare.seconds, served.seconds, bare.cpu_seconds, served.cpu_seconds)
        steps = (str(bare.num_steps), str(served.num_steps), str(served.num_chunks))
        rows.append([*(f"{value:.3f}" for value in numbers), *steps])
    print(render(["in process s", "HTTP s", "cpu s", "HTTP cpu s", "steps", "HTTP steps", "chunks"], rows))
    wall = interval([pair["HTTP"].seconds / pair["in process"].seconds for pair in pairs])
    cpu = interval([pair["HTTP"].cpu_seconds / pair["in process"].cpu_seconds for pair in pairs])
    num_equal = sum(a == b for pair in pairs for a, b in zip(*(one.texts for one in pair.values()), strict=True))
    num_texts = len(pairs) * args.streams
    print(f"HTTP takes {wall} times the wall time and {cpu} times the processor time; {num_equal} of {num_texts} texts")
    print(f"are equal. {args.streams} streams, {args.target}, draft {args.draft}. JSON lines: {path}")
    return int(num_equal < num_texts or (args.most is not None and wall.median > 1 + args.most / 100))
