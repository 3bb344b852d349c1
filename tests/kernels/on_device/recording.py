"""A recording without a GPU: what a captured step touches is written down, and every replay must touch the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpretedFunction

from specdec.models.graphs import Result

HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Tape(TorchDispatchMode):
    """Every operation and kernel launch in order: outside tensors by address, inside ones by when they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, ...]] = []
        self._made: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        described = tuple(self._describe(x) for x in tree_flatten((args, kwargs))[0])
        known = {x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        self.lines.append((str(func), *described))
        for x in tree_flatten(result)[0]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self._made.setdefault(x.untyped_storage().data_ptr(), len(self._made))
                self._kept.append(x)
        return result

    def launched(self, name: str, arguments: list[Any]) -> None:
        """Note a kernel."""
        self.lines.append((name, *(self._describe(x) for x in arguments)))

    def _describe(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return repr(x)
        place = x.untyped_storage().data_ptr()
        own = ("inside", self._made[place]) if place in self._made else ("outside", place)
        return *own, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype


class HostReads:
    """Counts values that the host reads off tensors, outside of the interpreter's own work."""

    def __init__(self) -> None:
        self.count = 0
        self.tape: Tape | None = None
        self._is_launching = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch every way to read, and every launch."""
        for name in HOST_READS:
            monkeypatch.setattr(Tensor, name, self._watched(getattr(Tensor, name)))
        run = InterpretedFunction.run

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if self.tape is not None:
                self.tape.launched(kernel.fn.__name__, [grid, *args, *kwargs.items()])
            self._is_launching = True
            try:
                with torch.utils._python_dispatch._disable_current_modes():
                    return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            finally:
                self._is_launching = False

        monkeypatch.setattr(InterpretedFunction, "run", launch)

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._is_launching:
                self.count += 1
                assert self.tape is None, f"{method.__name__} waits for the device inside a recording"
            return method(*args, **kwargs)

        return watched

    @contextmanager
    def taping(self) -> Iterator[Tape]:
        """Write down what happens inside; a read off a tensor is a fault there."""
        tape = Tape()
        self.tape = tape
        try:
            with tape:
                yield tape
        finally:
            self.tape = None


class FakeCapture:
    """Stands in for CUDA graphs: a replay computes again and compares each step with what was recorded."""

    def __init__(self, reads: HostReads) -> None:
        self.reads = reads
        self.num_replays = 0

    def record(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """As `Capture.record`."""
        work()
        with self.reads.taping() as recorded:
            result = work()

        def replay() -> Result:
            self.num_replays += 1
            with self.reads.taping() as now:
                computed = work()
            for before, after in zip(recorded.lines, now.lines):
                assert before == after, f"recorded {before}, replayed {after}"
            assert len(recorded.lines) == len(now.lines)
            result[0].copy_(computed[0])
            return result

        return replay
