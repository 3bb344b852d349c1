"""Startup: seconds from the command to the first token, and the memory of the server that gave it.

    python -m evals.startup --repeats 3 -- --num-kv-blocks 256

What follows `--` goes to the server. Artefacts (the converted model, built kernels, the self-test's verdict) come from
the cache when they are there; the first of several repeats fills it.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from evals import results
from evals.flags import whole
from evals.table import render

PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server.

    ready_seconds, first_token_seconds   since the process was started
    cpu_seconds                          processor time of all its threads until then; a busy machine disturbs it least
    rss, peak_rss                        bytes after the first token, and the most so far (0 where unknown)
    """

    ready_seconds: float
    first_token_seconds: float
    cpu_seconds: float
    rss: int
    peak_rss: int


def start_once(arguments: Sequence[str]) -> Start:
    """Start a server, ask for one token, look at its memory, end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(results.ROOT / "serve.py"), "--port", str(port), "--host", "127.0.0.1", *arguments]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url)
            ready = time.monotonic() - began
            body = json.dumps({"model": _model(url), "prompt": "The sky is", "max_tokens": 1, "temperature": 0})
            request = urllib.request.Request(
                f"{url}/v1/completions", body.encode(), {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=60).read()
            first = time.monotonic() - began
            seen = psutil.Process(process.pid)
            spent = seen.cpu_times()
            return Start(ready, first, spent.user + spent.system, seen.memory_info().rss, _peak(process.pid))
        finally:
            process.terminate()


def _model(url: str) -> str:
    answer = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))
    return str(answer["data"][0]["id"])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready within {PATIENCE:.0f} s")


def _peak(pid: int) -> int:
    """VmHWM of Linux, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a start; 1 where a limit was given and missed by the best of them."""
    argv = list(sys.argv[1:] if argv is None else argv)
    own, server = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = _parse(own)
    file = results.opened("evals.startup", argv, args.out)
    starts = []
    for _ in tqdm(range(args.repeats), unit="start", disable=None):
        starts.append(start_once(server))
        file.write("startup.start", asdict(starts[-1]))
    lines = [
        [
            *(f"{seconds:.1f}" for seconds in (s.ready_seconds, s.first_token_seconds, s.cpu_seconds)),
            *(f"{size / 2**20:.0f}" for size in (s.rss, s.peak_rss)),
        ]
        for s in starts
    ]
    print(render(["ready s", "first token s", "cpu s", "RSS MiB", "peak MiB"], lines))
    best = min(s.first_token_seconds for s in starts)
    least = min(s.rss for s in starts) / 2**20
    return int(best > args.most_seconds or least > args.most_mib)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = results.parser("evals.startup", __doc__)
    add = parser.add_argument
    add("--repeats", type=whole(1), default=3)
    add("--most-seconds", type=float, default=float("inf"), help="fail where the first token comes later")
    add("--most-mib", type=float, default=float("inf"), help="fail where the server's memory is larger")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
