"""The attention kernels compile for GPUs that are not here, and the defaults keep everything in registers."""

import pytest

from specdec.kernels import dispatch
from specdec.kernels.paged_attention import compile_cases

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(dispatch.mode() == "interpret", reason="kernels are interpreted in this process")

CASES = [(case, target) for case in compile_cases() for target in case.targets]
SMALLEST = [(case, target) for case, target in CASES if case.name == "verify_attention d64 x3 bf16"]


def assert_compiles(case: object, target: str) -> None:
    from specdec.kernels.ahead_of_time import compile_case

    report = compile_case(case, target)  # type: ignore[arg-type]
    assert not report.spills, f"{report.spills} bytes a thread are spilled"


@pytest.mark.parametrize("case,target", SMALLEST, ids=lambda x: getattr(x, "name", x))
def test_verification_compiles_without_spills(case: object, target: str) -> None:
    assert_compiles(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("case,target", CASES, ids=lambda x: getattr(x, "name", x))
def test_every_default_compiles_without_spills(case: object, target: str) -> None:
    """pytest -m slow tests/kernels/test_triton_attention_compiles.py"""
    assert_compiles(case, target)


def test_the_cases_cover_what_the_door_accepts() -> None:
    """Every width from 32 to 256 that models use, every dtype with its cache, all three targets."""
    names = {case.name for case, _ in CASES}
    for op in ("verify_attention", "prefill_attention"):
        for width in ("d32", "d64", "d80", "d96", "d128", "d192/128", "d256"):
            for kind in ("bf16", "fp16", "fp32", "bf16 u8 cache", "bf16 fp8e4nv cache"):
                assert f"{op} {width} x4 {kind}" in names
    assert {target for _, target in CASES} == {"sm_80", "sm_90", "gfx942"}
