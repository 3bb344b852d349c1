"""Interrupts: Ctrl-C takes effect between steps, so that no book is left half written.

It knows one signal of the main thread. A second Ctrl-C is not put off.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def between_steps() -> Iterator[Callable[[], None]]:
    """Put Ctrl-C off until the callable it gives is called; other threads get one that does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pending: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)
        if len(pending) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pending:
            pending.clear()
            raise KeyboardInterrupt

    before: Any = signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
