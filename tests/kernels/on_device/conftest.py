"""Tests of Triton kernels: on a GPU where there is one, else interpreted.

Whether kernels are interpreted is fixed when they are decorated, so without a GPU these tests run in a process of
their own: `tests/kernels/test_interpreted.py` starts it, or by hand
SPECDEC_KERNELS=interpret python -m pytest tests/kernels/on_device
"""

import pytest
import torch

from specdec.kernels import dispatch

RUNS = dispatch.mode() == "interpret" or (torch.cuda.is_available() and dispatch.mode() in ("auto", "triton"))
REASON = "no GPU; tests/kernels/test_interpreted.py runs these in Triton's interpreter"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where neither a GPU nor the interpreter is at hand."""
    if not RUNS:
        for item in items:
            if "kernels/on_device" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def device() -> torch.device:
    """Where tensors go."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
