"""Compiling Triton kernels for GPUs that are not here, and reading off what they take.

Knows Triton's compiler and the two object formats. It does not know which kernels exist: each op lists its own
configurations as `compile_cases()`. Needs a process in which kernels are not interpreted.
"""

from specdec.kernels.ahead_of_time.case import MOST_SHARED, TARGETS, CompileCase, Report
from specdec.kernels.ahead_of_time.compiler import compile_case

__all__ = ["MOST_SHARED", "TARGETS", "CompileCase", "Report", "compile_case"]
