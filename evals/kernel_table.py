"""What kernels compile to: registers, spills and shared memory of every configuration, in processes of their own.

It knows which ops list configurations. A compiler that dies takes one process with it and is reported as a failure.
Triton keeps what it compiled by source (TRITON_CACHE_DIR), so a table that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import marked
from evals.table import render
from specdec.kernels.ahead_of_time import MOST_SHARED, TARGETS

FOLDERS = {
    "verify_attention": "paged_attention",
    "prefill_attention": "paged_attention",
    "write_kv": "write_kv",
    "accept": "accept",
}
HEADERS = ["kernel", "target", "registers", "spilled bytes", "shared bytes", "binary bytes"]
MARK = "compiled"


@dataclass(frozen=True, slots=True)
class Line:
    """One configuration on one target.

    is_default   a launch uses it unless told otherwise
    numbers      registers a thread, spilled bytes, shared bytes, bytes of the binary; None where it does not compile
    error        why not
    """

    name: str
    target: str
    is_default: bool
    numbers: tuple[int, int, int, int] | None
    error: str = ""

    @property
    def spills(self) -> bool:
        """Registers did not suffice."""
        return self.numbers is not None and self.numbers[1] > 0

    @property
    def is_bad(self) -> bool:
        """It cannot be launched on the target, or is a default and spills."""
        return self.numbers is None or self.numbers[2] > MOST_SHARED[self.target] or (self.is_default and self.spills)

    def cells(self) -> list[str]:
        """For the table."""
        found = [str(number) for number in self.numbers] if self.numbers else ["-"] * 4
        return [self.name, self.target, *found]


def print_table(ops: Sequence[str], space: bool, match: str, jobs: int, readme: Path | None = None) -> int:
    """Compile, print, and return 1 where a line is bad; `readme` gets the same, a line a kernel."""
    lines = compile_all(folders_of(ops), space, match, jobs)
    print(render(HEADERS, [line.cells() for line in lines]))
    for line in lines:
        if line.is_bad:
            print(f"{line.name} for {line.target}: {line.error or 'spills, or asks for too much shared memory'}")
    print(f"\n{summary(lines)}")
    if readme is not None:
        marked.rewrite(readme, MARK, f"{summary(lines)}.\n\n{marked.folded(_LEGEND, by_kernel(lines))}")
    return 1 if any(line.is_bad for line in lines) else 0


_LEGEND = "Of every default: registers a thread / spilled bytes / shared bytes"


def summary(lines: Sequence[Line]) -> str:
    """How many there are, and how many are bad."""
    said = []
    for kind, is_default in (("defaults", True), ("of the search space", False)):
        group = [line for line in lines if line.is_default == is_default]
        spills, bad = sum(line.spills for line in group), sum(line.is_bad for line in group)
        said.append(f"{len(group)} {kind} compiled, {spills} spill, {bad} cannot be used")
    return "; ".join(said)


def by_kernel(lines: Sequence[Line]) -> str:
    """The defaults, a line a kernel and a column a target: registers, spilled bytes, shared bytes."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        if line.is_default:
            rows.setdefault(line.name, {})[line.target] = " / ".join(line.cells()[2:5])
    return render(["kernel", *TARGETS], [[name, *(row.get(t, "-") for t in TARGETS)] for name, row in rows.items()])


def folders_of(ops: Sequence[str]) -> list[str]:
    """Folders of `kernels/`, in order; ValueError names an op that is not known."""
    for op in ops:
        if op not in FOLDERS:
            raise ValueError(f"op is {op!r}; known are {', '.join(FOLDERS)}")
    return sorted({FOLDERS[op] for op in ops}, key=list(FOLDERS.values()).index)


def compile_all(folders: Sequence[str], space: bool, match: str, jobs: int) -> list[Line]:
    """Compile every configuration whose name holds `match`, for each of its targets."""
    with _pool(jobs) as pool:
        listed = [entry for folder in folders for entry in pool.submit(_list, folder, space).result()]
    todo = [entry for entry in listed if match in entry[2]]
    lines: list[Line] = []
    while todo:
        with _pool(jobs) as pool:
            futures = [pool.submit(_compile, *entry) for entry in todo]
            for future in futures:
                future.add_done_callback(_say)
            done = [_result(future, entry) for future, entry in zip(futures, todo, strict=True)]
        # After a crash the rest is unfinished: the first of them is blamed, the others start again.
        first = next((i for i, line in enumerate(done) if line is None), len(done))
        lines += [line for line in done[:first] if line is not None]
        if first < len(done):
            lines.append(Line(*todo[first][2:], None, "the compiler crashed"))
        todo = todo[first + 1 :]
    return lines


_Entry = tuple[str, int, str, str, bool]


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Fresh processes, in which kernels are not interpreted whatever this one does."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _as_on_a_gpu)


def _as_on_a_gpu() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("SPECDEC_KERNELS", None)


@functools.cache
def _cases(folder: str, space: bool) -> list[Any]:
    module = importlib.import_module(f"specdec.kernels.{folder}")
    cases: list[Any] = module.compile_cases(space)
    return cases


def _list(folder: str, space: bool) -> list[_Entry]:
    """Folder, number (negative: of the search space), name, target and whether a default."""
    cases = _cases(folder, space)
    return [
        (folder, index if not space else -1 - index, case.name, target, case.is_default)
        for index, case in enumerate(cases)
        for target in case.targets
    ]


def _compile(folder: str, number: int, name: str, target: str, is_default: bool) -> Line:
    from specdec.kernels.ahead_of_time import compile_case

    case = _cases(folder, number < 0)[number if number >= 0 else -1 - number]
    try:
        report = compile_case(case, target)
    except Exception as error:
        reason = str(error).strip().splitlines()
        return Line(name, target, is_default, None, f"{type(error).__name__}: {reason[0] if reason else ''}")
    numbers = (report.registers, report.spills, report.shared_bytes, report.binary_bytes)
    return Line(name, target, is_default, numbers)


def _say(future: Future[Line]) -> None:
    """Progress, on stderr: the whole table takes from minutes to an hour of one core."""
    if not future.cancelled() and future.exception() is None:
        print("  ".join(future.result().cells()[:4]), file=sys.stderr, flush=True)


def _result(future: Future[Line], entry: _Entry) -> Line | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return None
