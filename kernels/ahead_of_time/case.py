"""A configuration to compile, and what came out of it: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TARGETS = ("sm_80", "sm_90", "gfx942")  # A100, H100 and H200, MI300X
MOST_SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes a program can be launched with


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with everything fixed that its compiler must know.

    name         of the row in the table: op and what is special, such as "verify_attention d128 bf16"
    fn           the @triton.jit function
    signature    of every parameter, in order: "*bf16", "*i32", "i32", "fp32", "constexpr", ...
    constexprs   the values of the parameters that are "constexpr"
    targets      where it must compile
    is_default   a launch uses it unless told otherwise, so it must not spill; others belong to a search space
    unaligned    pointers that need not be multiples of 16 bytes; all others are
    multiples_of_16   integers that are, which lets loads be wide
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[str, ...] = TARGETS
    is_default: bool = True
    unaligned: tuple[str, ...] = ()
    multiples_of_16: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What one case takes on one target.

    registers      per thread (vector registers on AMD)
    spills         bytes a thread keeps in memory for want of registers
    shared_bytes   per program
    """

    case: CompileCase
    target: str
    registers: int
    spills: int
    shared_bytes: int
    binary_bytes: int
