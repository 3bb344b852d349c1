"""Triton's compiler without a GPU: a case goes in, what its program takes comes out.

It knows Triton's targets, NVIDIA's `cuobjdump` (Triton brings it) and the metadata of AMD's assembly.
"""

import os
import re
import subprocess
import tempfile
from typing import Any

from specdec.kernels.ahead_of_time.case import CompileCase, Report

_ALIGNED = [["tt.divisibility", 16]]


def compile_case(case: CompileCase, target: str) -> Report:
    """Compile for "sm_80", "sm_90" or "gfx942", down to the binary.

    RuntimeError where kernels are decorated for the interpreter in this process; what Triton raises where it refuses.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels cannot be compiled in this process; unset it")
    compiled = triton.compile(
        _source(case), target=_target(target), options={"num_warps": case.num_warps, "num_stages": case.num_stages}
    )
    is_amd = "amdgcn" in compiled.asm
    registers, spills = _amd_resources(compiled.asm["amdgcn"]) if is_amd else _nvidia_resources(compiled.asm["cubin"])
    return Report(case, target, registers, spills, int(compiled.metadata.shared), len(compiled.kernel))


def _source(case: CompileCase) -> Any:
    from triton.compiler import ASTSource

    names = list(case.signature)
    assert names == case.fn.arg_names, f"{case.name}: signature {names} is not the kernel's {case.fn.arg_names}"
    aligned = [n for n, kind in case.signature.items() if kind.startswith("*") and n not in case.unaligned]
    return ASTSource(
        case.fn,
        signature=dict(case.signature),
        constexprs={(names.index(name),): value for name, value in case.constexprs.items()},
        attrs={(names.index(name),): _ALIGNED for name in (*aligned, *case.multiples_of_16)},
    )


def _target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return (
        GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    )


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack: kernels without calls or local arrays only spill there."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


def _amd_resources(assembly: str) -> tuple[int, int]:
    """Vector registers a thread (both files), and bytes of its scratch."""
    counts = {name: int(value) for name, value in re.findall(r"\.(\w+): +(\d+)$", assembly, re.MULTILINE)}
    return counts["vgpr_count"], counts["private_segment_fixed_size"]
