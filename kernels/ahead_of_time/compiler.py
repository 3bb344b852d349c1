"""From a CompileCase to a cubin or an hsaco, and what its metadata says of registers, spills and shared memory."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.kernels.ahead_of_time.case import CompileCase, Report

_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_case(case: CompileCase, target: str) -> Report:
    """Compile one case for one target; raises what Triton raises where it cannot."""
    if target not in _TARGETS:
        raise ValueError(f"target is {target!r}; it must be one of {', '.join(_TARGETS)}")
    compiled = triton.compile(
        ASTSource(case.fn, dict(case.signature), dict(case.constexprs), _alignments(case)),
        target=_TARGETS[target],
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    read = _read_amd if target.startswith("gfx") else _read_nvidia
    registers, spills, size = read(compiled.asm)
    return Report(case, target, registers, spills, compiled.metadata.shared, size)


def _alignments(case: CompileCase) -> dict[tuple[int], list[list[Any]]]:
    """Say of every pointer that it is a multiple of 16 bytes, as the launcher does after looking at it."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") and name not in case.unaligned
    }


def _read_nvidia(asm: dict[str, Any]) -> tuple[int, int, int]:
    """Return registers, spilled bytes and size of a cubin: what it keeps on its stack are spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(asm["cubin"])
        tool = str(triton.knobs.nvidia.cuobjdump.path)
        said = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"], len(asm["cubin"])


def _read_amd(asm: dict[str, Any]) -> tuple[int, int, int]:
    """Return vector registers, spilled bytes and size of an hsaco, from the notes in its assembly."""
    notes = {
        name: int(number)
        for name, number in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", asm["amdgcn"])
    }
    return notes["vgpr_count"], notes["private_segment_fixed_size"], len(asm["hsaco"])
