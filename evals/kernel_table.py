"""What kernels compile to: registers, spills and shared memory of every configuration, in processes of their own.

It knows which ops list configurations. A compiler that dies takes one process with it and is reported as a failure.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from evals.table import render

FOLDERS = {
    "verify_attention": "paged_attention",
    "prefill_attention": "paged_attention",
    "write_kv": "write_kv",
    "accept": "accept",
}
HEADERS = ["kernel", "target", "registers", "spilled bytes", "shared bytes", "binary bytes"]


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
    def is_bad(self) -> bool:
        """A default that spills or does not compile."""
        return self.is_default and (self.numbers is None or self.numbers[1] > 0)

    def cells(self) -> list[str]:
        """For the table."""
        found = [str(number) for number in self.numbers] if self.numbers else ["-"] * 4
        return [self.name, self.target, *found]


def print_table(ops: Sequence[str], space: bool, match: str, jobs: int) -> int:
    """Compile, print, and return 1 where a default is bad."""
    lines = compile_all(folders_of(ops), space, match, jobs)
    print(render(HEADERS, [line.cells() for line in lines]))
    for line in lines:
        if line.error:
            print(f"{line.name} for {line.target}: {line.error}")
    bad = [line for line in lines if line.is_bad]
    spills = sum(line.numbers is not None and line.numbers[1] > 0 for line in lines)
    print(f"\n{len(lines)} compiled, {spills} spill, {len(bad)} defaults spill or do not compile")
    return 1 if bad else 0


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


def _result(future: Future[Line], entry: _Entry) -> Line | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return None
