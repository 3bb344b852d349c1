"""Kernels measured on this machine's GPU, beside PyTorch's own and, where installed, flash-attn and flashinfer.

It knows how to fill a paged cache and how others want to be called. An op whose tests fail here is not measured.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evals import kernel_peers
from evals.results import ROOT, ResultFile
from evals.roofline import CARDS, OPS, Case, Cost, Grid, cases, fits
from evals.table import render
from specdec.kernels.accept import accept
from specdec.kernels.paged_attention import paged_attention
from specdec.kernels.write_kv import write_kv

BLOCK_SIZE = 16
HEADERS = ["op", "shape", "batch", "context", "K", "engine", "us", "GB/s", "TFLOP/s", "floor %"]
TESTS = {
    "verify_attention": "test_triton_attention.py",
    "prefill_attention": "test_triton_attention.py",
    "write_kv": "test_triton_write_kv.py",
    "accept": "test_triton_accept.py",
}
Calls = dict[str, Callable[[], Any]]


def run(ops: Sequence[str], grid: Grid, out: ResultFile) -> int:
    """Measure every case of every op whose tests pass; 1 where some did not."""
    if not torch.cuda.is_available():
        raise ValueError("--run needs a CUDA or HIP device, and torch sees none; --model and --compile-only do not")
    for op in ops:
        if op not in OPS:
            raise ValueError(f"op is {op!r}; known are {', '.join(OPS)}")
    red = [op for op in ops if not is_green(op)]
    for op in red:
        print(f"{op}: its tests fail on this machine, so it is not measured (tests/kernels/on_device/{TESTS[op]})")
        out.write("kernels.refused", {"op": op})
    found = [cells for op in ops if op not in red for cells in _measure_op(op, grid, out)]
    print(render(HEADERS, found) if found else "nothing was measured")
    print(f"\n{torch.cuda.get_device_name(0)}; {out.path}")
    return 1 if red else 0


def is_green(op: str) -> bool:
    """Whether the tests of an op pass on this machine."""
    command = [sys.executable, "-m", "pytest", f"tests/kernels/on_device/{TESTS[op]}", "-q", "--no-shares"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def _measure_op(op: str, grid: Grid, out: ResultFile) -> list[list[str]]:
    """All cases that fit: every engine's time, on disk as soon as it is known."""
    name = torch.cuda.get_device_name(0)
    card = next((card for key, card in CARDS.items() if key in name), None)
    total = torch.cuda.get_device_properties(0).total_memory
    table = []
    for case in cases(op, grid):
        if not fits(CARDS["MI300X"], case) or _bytes_needed(case) > 0.8 * total:
            continue
        cost = OPS[op](case)
        for engine, seconds, error in _times(BUILD[op](case)):
            record = {
                "op": op, "shape": case.shape.name, "batch": case.batch, "context": case.context, "K": case.drafts,
                "engine": engine, "seconds": seconds, "error": error, "bytes": cost.bytes, "flops": cost.flops,
                "floor_seconds": None if card is None else cost.floor(card), "triton": _triton_version(),
                "driver": torch.version.cuda or torch.version.hip,
            }  # fmt: skip
            out.write("kernels.run", record)
            table.append(_cells(record, cost))
    return table


def _bytes_needed(case: Case) -> float:
    """One layer's cache, twice: paged, and contiguous for those who need it so."""
    return 2.0 * case.batch * case.context * case.shape.kv_bytes


def _times(calls: Calls) -> list[tuple[str, float | None, str]]:
    """Median seconds of every call, cold cache; or why there are none."""
    from triton.testing import do_bench

    found: list[tuple[str, float | None, str]] = []
    for engine, call in calls.items():
        try:
            found.append((engine, do_bench(call, return_mode="median") / 1e3, ""))
        except Exception as error:  # another's kernel that refuses a shape must not end the sweep
            found.append((engine, None, f"{type(error).__name__}: {error}".splitlines()[0]))
    return found


def _cells(record: dict[str, Any], cost: Cost) -> list[str]:
    seconds, floor = record["seconds"], record["floor_seconds"]
    where = [str(record[key]) for key in ("op", "shape", "batch", "context", "K", "engine")]
    if seconds is None:
        return [*where, "-", "-", "-", record["error"][:60]]
    rates = [f"{cost.bytes / seconds / 1e9:.0f}", f"{cost.flops / seconds / 1e12:.1f}"]
    return [*where, f"{seconds * 1e6:.1f}", *rates, "-" if floor is None else f"{100 * floor / seconds:.0f}"]


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _attention(case: Case, query_len: int) -> Calls:
    """Ours over shuffled blocks, others over the same numbers where they want them."""
    shape, blocks = case.shape, -(-case.context // BLOCK_SIZE)
    k_cache, v_cache = (_randn(case.batch * blocks, BLOCK_SIZE, shape.G, shape.D) for _ in range(2))
    order = torch.randperm(case.batch * blocks, device="cuda", dtype=torch.int32)
    tables = order.view(case.batch, blocks)
    q = _randn(case.batch * query_len, shape.H, shape.D)
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
    bounds = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * query_len
    scale = shape.D**-0.5

    def ours() -> torch.Tensor:
        return paged_attention(q, k_cache, v_cache, tables, lens, bounds, scale, max_query_len=query_len)

    return {"specdec": ours, **kernel_peers.attention(q, k_cache, v_cache, tables, case.context)}


def _write_kv(case: Case) -> Calls:
    shape, tokens = case.shape, case.batch * (case.drafts + 1)
    k, v = (_randn(tokens, shape.G, shape.D) for _ in range(2))
    k_cache, v_cache = (_randn(2 * tokens, BLOCK_SIZE, shape.G, shape.D) for _ in range(2))
    slots = torch.randperm(2 * tokens * BLOCK_SIZE, device="cuda")[:tokens]

    def by_index() -> None:
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, v)

    return {"specdec": lambda: write_kv(k, v, slots, k_cache, v_cache), "index_copy_": by_index}


def _accept(case: Case) -> Calls:
    rows = case.batch * (case.drafts + 1)
    logits = _randn(rows, case.shape.V)
    seeds, positions, drafts = (torch.randint(0, 1000, (rows,), device="cuda") for _ in range(3))
    bounds = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * (case.drafts + 1)
    warm, greedy = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    return {
        "specdec": lambda: accept(logits, seeds, positions, warm, drafts, bounds),
        "specdec greedy": lambda: accept(logits, seeds, positions, greedy, drafts, bounds),
        "softmax + multinomial": lambda: logits.float().softmax(1).multinomial(1),
        "argmax": lambda: logits.argmax(1),
    }


BUILD: dict[str, Callable[[Case], Calls]] = {
    "verify_attention": lambda case: _attention(case, case.drafts + 1),
    "prefill_attention": lambda case: _attention(case, min(2048, case.context)),
    "write_kv": _write_kv,
    "accept": _accept,
}
