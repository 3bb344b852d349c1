"""Threads: how many the CPU kernels use, and how they keep out of the way of everyone else's.

It knows cores, quotas and variables of the environment. One team of OpenMP threads, torch's own, runs all kernels; the
server's event loop and the engine's thread come on top of it and want moments only.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import MutableMapping
from pathlib import Path

import psutil

logger = logging.getLogger("specdec")

MOST_THREADS = 32
"""More share so little of a step among them that waiting for each other costs what they save (a guess: the largest
machine this was measured on has two cores)."""


def pick_threads(usable: int, physical: int | None, quota: float | None) -> int:
    """One thread a physical core this process may use, within its quota and MOST_THREADS.

    usable     logical cores the process may run on
    physical   cores of the machine; its logical ones share their arithmetic
    quota      processors' worth of time the container allows

    >>> pick_threads(2, 2, None), pick_threads(8, 4, None), pick_threads(64, 64, None), pick_threads(64, 64, 1.5)
    (2, 4, 32, 2)
    """
    limits = [usable, physical or usable, MOST_THREADS]
    if quota is not None:
        limits.append(math.ceil(quota))
    return max(min(limits), 1)


def default_threads() -> int:
    """The same, of this machine and process."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return pick_threads(usable, psutil.cpu_count(logical=False), _quota())


def _quota() -> float | None:
    """Processors' worth of time by control groups, version 2; None: no limit is known."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def use_threads(num_threads: int | None) -> int:
    """Set the threads of the kernels for the whole process and return them.

    num_threads   None: OMP_NUM_THREADS or what was set before, but not more than `default_threads`
    """
    import torch

    wanted = num_threads if num_threads is not None else min(torch.get_num_threads(), default_threads())
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
    return wanted


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Say what libraries read once, when they are loaded; what is said already stays.

    Threads that wait for the next step sleep (OMP_WAIT_POLICY): spinning would take the cores from the event loop, and
    from other processes. Tokenizers encode one text at a time and start no threads of their own.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
