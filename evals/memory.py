"""Peak memory of this process while something runs, weights and caches of everything loaded included.

It knows Linux' and CUDA's counters; elsewhere it says None.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Let the peak start at what is in use now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # else the peak is that of the whole process so far, which is still true of it
        _RESET.write_text("5")


def peak_bytes() -> int | None:
    """Most memory in use since `forget_peak`: of the device where there is one, else resident in the host's."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
