"""The attention kernels compile for GPUs that are not here: the defaults without spills, what a sweep tries at all."""

import pytest

from specdec.kernels import dispatch
from specdec.kernels.paged_attention import compile_cases

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(dispatch.mode() == "interpret", reason="kernels are interpreted in this process")

CASES = compile_cases()
TRIED = [case for case in compile_cases(space=True) if not case.is_default]
SMALLEST = [(case, target) for case in CASES for target in case.targets if case.name == "verify_attention d64 x3 bf16"]
FEW = [(case, target) for case in TRIED for target in case.targets if " d64 x4 bf16 tile" in case.name]


@pytest.mark.parametrize("case,target", SMALLEST, ids=lambda x: getattr(x, "name", x))
def test_verification_compiles_without_spills(case: object, target: str) -> None:
    from specdec.kernels.ahead_of_time import compile_case

    report = compile_case(case, target)  # type: ignore[arg-type]
    assert not report.spills, f"{report.spills} bytes a thread are spilled"


@pytest.mark.slow
@pytest.mark.parametrize("case,target", FEW, ids=lambda x: getattr(x, "name", x))
def test_what_a_sweep_may_try_compiles_and_fits(case: object, target: str) -> None:
    """One width of the search space; all of it: python -m evals.kernels --compile-only --space"""
    from specdec.kernels.ahead_of_time import MOST_SHARED, compile_case

    assert compile_case(case, target).shared_bytes <= MOST_SHARED[target]  # type: ignore[arg-type]


def test_the_cases_cover_what_the_door_accepts() -> None:
    """Every width from 32 to 256 that models use, every dtype with its cache, all three targets."""
    names = {case.name for case in CASES}
    kinds = ["bf16", "fp16", "fp32", "fp64"]
    kinds += [f"{name} {cache} cache" for name in ("bf16", "fp16", "fp32") for cache in ("u8", "fp8e4nv")]
    for op in ("verify_attention", "prefill_attention"):
        for width in ("d32", "d64", "d80", "d96", "d128", "d192/128", "d256"):
            assert {f"{op} {width} x4 {kind}" for kind in kinds} <= names
            assert any(case.name.startswith(f"{op} {width} x4 bf16 tile") for case in TRIED)
    assert {target for case in CASES for target in case.targets} == {"sm_80", "sm_90", "gfx942"}


def test_no_two_cases_are_one_binary() -> None:
    seen = [
        (case.fn.__name__, *case.signature.items(), *map(str, case.constexprs.items()), case.num_warps, case.num_stages)
        for case in compile_cases(space=True)
    ]
    assert len(seen) == len(set(seen))
