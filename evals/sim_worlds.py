"""Worlds to simulate in: what a step costs, when requests arrive, and how often drafts are right.

It knows formulas and published or measured numbers, each with where it comes from; it runs nothing.
"""

from __future__ import annotations

import bisect
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

PROCESS, COST = "recorded.process", "recorded.cost"
"""Kinds of the lines of a recording."""


@dataclass(frozen=True, slots=True)
class World:
    """Seconds of forwards.

    verify   (tokens, cached tokens read, prompt tokens among them) -> seconds of the target
    draft    tokens -> seconds of one draft pass; None where drafting is free (n-gram, suffix)
    """

    name: str
    verify: Callable[[int, int, int], float]
    draft: Callable[[int], float] | None = None


def lines(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Straight lines through measured points, going on behind the last.

    >>> lines([(1, 10), (3, 20)])(2), lines([(1, 10), (3, 20)])(5)
    (15.0, 30.0)
    """

    if len(points) < 2:
        raise ValueError("lines need two points or more")
    starts = [x for x, _ in points[1:-1]]
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]

    def at(x: float) -> float:
        i = bisect.bisect_left(starts, x)
        return points[i][1] + slopes[i] * (x - points[i][0])

    return at


def cpu_world(draft_share: float | None = None) -> World:
    """SmolLM2-135M on 2 CPU cores, as measured there: decode tokens 1, 8, 32, 128, and 256 prompt tokens in 330 ms.

    draft_share   a draft pass takes this share of the target's (an assumption); None: drafting is free
    """
    decode = lines([(1, 0.0155), (8, 0.023), (32, 0.075), (128, 0.240)])
    unscored = (decode(256) - 0.330) / 256

    def verify(tokens: int, keys: int, prompts: int) -> float:
        return decode(tokens) - unscored * prompts

    if draft_share is None:
        return World("cpu, free drafts", verify)
    return World(f"cpu, draft at {draft_share:g}", verify, lambda tokens: draft_share * decode(tokens))


@dataclass(frozen=True, slots=True)
class Device:
    """Vendor's numbers for dense bf16, and the shares of them that are assumed to be reached."""

    bytes_per_second: float
    flops: float
    bandwidth_share: float = 0.8
    compute_share: float = 0.6
    launch_seconds: float = 0.0005


DEVICES = {"h100": Device(3.35e12, 989e12), "h200": Device(4.8e12, 989e12)}


def roofline(device: Device, parameters: float, key_bytes: int) -> Callable[[int, int], float]:
    """Williams, Waterman, Patterson 2009: a forward takes the longer of moving its bytes and doing its sums.

    parameters   of a bf16 model: 2 bytes and 2 operations a token each
    key_bytes    cached bytes a token of context
    """

    def seconds(tokens: int, keys: int) -> float:
        moving = (2 * parameters + keys * key_bytes) / (device.bytes_per_second * device.bandwidth_share)
        doing = 2 * parameters * _tiles(tokens) / (device.flops * device.compute_share)
        return device.launch_seconds + max(moving, doing)

    return seconds


def _tiles(tokens: int) -> int:
    """Matrix tiles hold 16 tokens, 64 beyond that: the shelf."""
    size = 16 if tokens <= 64 else 64
    return -(-tokens // size) * size


def gpu_world(name: str, *, is_free: bool = False) -> World:
    """Llama-3.1-8B on one GPU, drafted by Llama-3.2-1B or for nothing. Context of the draft is not counted."""
    target = roofline(DEVICES[name], 8.03e9, 32 * 8 * 128 * 2 * 2)
    small = roofline(DEVICES[name], 1.24e9, 16 * 8 * 64 * 2 * 2)
    draft = None if is_free else lambda tokens: small(tokens, 0)
    return World(f"{name}, {'free drafts' if is_free else '1B draft'}", lambda n, keys, prompts: target(n, keys), draft)


def read_world(path: Path) -> World:
    """The machine of a recording: its step times by tokens, and what a prompt token adds; drafting is free."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    costs = [record for record in records if record.get("kind") == COST]
    if len(costs) != 1 or len(costs[0]["by_tokens"]) < 2:
        raise ValueError(f"{path} holds no cost curve; python -m evals.record writes one")
    decode, per_prompt = lines(costs[0]["by_tokens"]), float(costs[0]["per_prompt"])

    def verify(tokens: int, keys: int, prompts: int) -> float:
        return (decode(tokens - prompts) if tokens > prompts else 0.0) + per_prompt * prompts

    return World(f"measured on {costs[0]['machine']['cpu']}, free drafts", verify)


def find_world(name: str) -> World:
    """By its name, or of a recording."""
    return WORLDS[name]() if name in WORLDS else read_world(Path(name))


WORLDS: dict[str, Callable[[], World]] = {
    "cpu": cpu_world,
    "cpu-draft": lambda: cpu_world(0.2),
    "h100": lambda: gpu_world("h100"),
    "h100-free": lambda: gpu_world("h100", is_free=True),
    "h200": lambda: gpu_world("h200"),
}


# ------------------------------------------------------------------ acceptance


@dataclass(frozen=True, slots=True)
class Process:
    """The chances of one request's drafts, in phases of its output.

    phases    phases[i][j]: the conditional chance at place j, where there is an offer
    offered   how often there is one, of each phase; none: always
    """

    phases: tuple[tuple[float, ...], ...]
    offered: tuple[float, ...] = ()

    def _phase(self, progress: float) -> int:
        return min(int(progress * len(self.phases)), len(self.phases) - 1)

    def chances(self, progress: float, depth: int) -> list[float]:
        """Of drafts 1..depth at a share of the output; the last known place stands for those behind it."""
        phase = self.phases[self._phase(progress)]
        return [phase[min(j, len(phase) - 1)] for j in range(depth)]

    def offers(self, progress: float) -> float:
        """The chance of an offer at a share of the output."""
        return self.offered[self._phase(progress)] if self.offered else 1.0


SYNTHETIC = {"chat": (0.62, 0.15), "code": (0.82, 0.10), "copying": (0.95, 0.03), "noise": (0.02, 0.01)}
"""Mean and spread of the first place's chance over requests: synthetic, not measured."""


def synthetic(kind: str, rng: random.Random) -> Process:
    """A request of a kind; "mixed" draws one kind a request. Chances wander between the quarters of an output."""
    chosen = rng.choice(sorted(SYNTHETIC)) if kind == "mixed" else kind
    mean, spread = SYNTHETIC[chosen]
    own = rng.gauss(mean, spread)
    phases = []
    for _ in range(4):
        first = min(max(rng.gauss(own, spread / 3), 0.0), 0.99)
        phases.append(tuple(first * (1.0 - 0.03 * j) for j in range(8)))
    return Process(tuple(phases))


Pairs = list[tuple[int, int]]


def read_processes(path: Path, num_phases: int = 4) -> list[Process]:
    """Processes of a recording or of a controller's trace: each request's offers and right drafts by phase and place.

    Shares of few drafts are shrunk to those of the whole file by four drafts' weight. A trace knows nothing of
    drafts that its controller did not admit; a recording of fixed lengths has no such gap.
    """
    rows = _recorded_pairs([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    if rows is None:
        raise ValueError(f"{path} is neither a recording (python -m evals.record) nor a trace (--speculative-trace)")
    if not any(drafted for own in rows for drafted, _ in own):
        raise ValueError(f"{path} holds no drafts")
    depth = max(drafted for own in rows for drafted, _ in own)
    whole = _shares([pair for own in rows for pair in own], [0.5] * depth)
    made = []
    for own in rows:
        size = math.ceil(len(own) / num_phases)
        parts = [own[i : i + size] for i in range(0, len(own), size)]
        offered = tuple(sum(drafted > 0 for drafted, _ in part) / len(part) for part in parts)
        made.append(Process(tuple(tuple(_shares(part, whole)) for part in parts), offered))
    return made


def _recorded_pairs(records: Sequence[dict[str, Any]]) -> list[Pairs] | None:
    """(drafts judged, drafts right) of every step that had room for drafts, request by request."""
    recorded = [[(d, a) for d, a in r["drafts"]] for r in records if r.get("kind") == PROCESS]
    if recorded:
        return recorded
    if not records or "rows" not in records[0]:
        return None
    traced: dict[str, Pairs] = defaultdict(list)
    for step in records:
        for row in step["rows"]:
            if row["budgeted"] and (row["admitted"] or not row["drafted"]):  # what was offered and cut, nobody judged
                traced[row["request_id"]].append((row["admitted"], row["accepted"]))
    return list(traced.values())


def _shares(pairs: Pairs, prior: Sequence[float]) -> list[float]:
    found = []
    for j, before in enumerate(prior):
        tried = sum(admitted > j <= accepted for admitted, accepted in pairs)
        right = sum(accepted > j for _, accepted in pairs)
        found.append((right + 4 * before) / (tried + 4))
    return found


# ------------------------------------------------------------------ arrivals


def arrivals(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Times of arrival, for ever, at a mean of `rate` a second.

    kind   "poisson"; "bursts": on average eight at once; "day": Poisson whose rate follows a day's curve,
           from a quarter of the mean at night to 1.75 times in the day, one day an hour long
    """
    now = 0.0
    while True:
        if kind == "bursts":
            now += rng.expovariate(rate / 8)
            yield from [now] * (1 + int(rng.expovariate(1 / 7.5)))
        elif kind == "day":
            now += rng.expovariate(1.75 * rate)
            if rng.random() * 1.75 <= 1.0 - 0.75 * math.cos(2 * math.pi * now / 3600):
                yield now
        else:
            now += rng.expovariate(rate)
            yield now


ARRIVALS = ("poisson", "bursts", "day")
