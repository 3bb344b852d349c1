"""Profile: how long forwards of a few sizes take on this machine, measured once and kept in a file.

It knows a runner and shapes; what the numbers are for is the controller's business. It writes into
cache blocks nobody holds yet, so it runs before the first request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from specdec.kernels import native
from specdec.models.forward_batch import Segment
from specdec.models.runner import ModelRunner
from specdec.models.sources import cache_directory

logger = logging.getLogger("specdec")

SHAPES = ((1, 1), (4, 1), (8, 1), (16, 1), (8, 4), (32, 1), (16, 4), (32, 4), (64, 4), (1, 256), (64, 8))
"""Rows and tokens a row, the cheap ones first; a size that comes twice is kept as its dearer."""
CONTEXT = 512  # cached tokens a row has in the last measurement
WORTH_KEEPING = 0.5  # seconds; what is measured faster is measured every time
_VERSION = 2


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of forwards.

    seconds   tokens -> seconds with next to no context, every token scored
    key       seconds per cached token read
    """

    seconds: dict[int, float]
    key: float


def profile(runner: ModelRunner, most_tokens: int, limit_seconds: float) -> Profile | None:
    """The profile of a model on this machine: from its file, else measured now; None where the limit forbids.

    limit_seconds   measuring stops at the first shape behind it; 0: no profile
    """
    if limit_seconds <= 0:
        return None
    path = cache_directory() / "profiles" / f"{_key(runner, most_tokens)}.json"
    found = _read(path)
    if found is None:
        began = time.perf_counter()
        found = measure(runner, most_tokens, limit_seconds)
        taken = time.perf_counter() - began
        logger.info("profiled the model in %.1f s at %d sizes", taken, len(found.seconds))
        if taken > WORTH_KEEPING:
            _write(path, found)
    return found


def measure(runner: ModelRunner, most_tokens: int, limit_seconds: float) -> Profile:
    """Time every shape that fits, the best of three runs behind a first that does not count."""
    end = time.perf_counter() + limit_seconds
    seconds: dict[int, float] = {}
    longest = 0.0
    for rows, width in SHAPES:
        if not _fits(runner, rows, width, most_tokens) or time.perf_counter() + 3 * longest > end:
            continue
        longest = _time(runner, rows, width, 0, end)
        seconds[rows * width] = max(longest, seconds.get(rows * width, 0.0))
    return Profile(seconds or {1: _time(runner, 1, 1, 0, end)}, _key_seconds(runner, end))


def _fits(runner: ModelRunner, rows: int, width: int, most_tokens: int) -> bool:
    size, blocks = runner.cache.block_size, runner.cache.num_blocks
    return rows * width <= most_tokens and rows * -(-width // size) <= blocks and width <= runner.model.max_model_len


def _key_seconds(runner: ModelRunner, end: float) -> float:
    """What a token of context adds to a decode step of one row."""
    size = runner.cache.block_size
    context = min(CONTEXT, runner.cache.num_blocks * size - 1, runner.model.max_model_len - 1)
    if context < size or time.perf_counter() > end:
        return 0.0
    return max(_time(runner, 1, 1, context, end) - _time(runner, 1, 1, 0, end), 0.0) / context


def _time(runner: ModelRunner, rows: int, width: int, context: int, end: float) -> float:
    """Seconds of one forward, wait for its result included."""
    size = runner.cache.block_size
    each = -(-(context + width) // size)
    segments = [Segment([0] * width, context, range(r * each, (r + 1) * each), width) for r in range(rows)]
    best = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        runner.forward(runner.pack(segments)).argmax(-1).cpu()
        taken = time.perf_counter() - began
        if attempt or time.perf_counter() > end:
            best = min(best, taken)
        if time.perf_counter() > end:
            break
    return best


def _key(runner: ModelRunner, most_tokens: int) -> str:
    """Names model, device, precision, kernels and threads: what the seconds depend on."""
    model = runner.model
    fast = model.fast
    packed = None if fast is None else [fast.head_code, sorted({kind for kind, _ in fast.held})]
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    facts = [
        _VERSION, str(model.path), str(model.config), str(model.dtype), str(model.device), device or platform.machine(),
        torch.get_num_threads(), packed, native.identity(), most_tokens, torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read(path: Path) -> Profile | None:
    """A profile from its file; one that cannot be read is measured again."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Profile({int(n): float(s) for n, s in values["seconds"].items()}, float(values["key"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _write(path: Path, found: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(found)), encoding="utf-8")
        part.replace(path)
    except OSError:
        logger.warning("the profile could not be kept in %s; it will be measured again", path)
