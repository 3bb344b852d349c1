"""Staging: host values reach a device without the host waiting for it.

It knows that a copy from pageable memory stops the host until the device has caught up, and that one from pinned
memory does not. The allocator of pinned memory hands a page out again only when its copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(
    values: NDArray[np.generic] | Sequence[float] | Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Values as a tensor on `device`, in their shape; an array keeps its dtype unless told otherwise."""
    if not isinstance(values, np.ndarray):
        host = torch.tensor(values, dtype=dtype)
    else:
        host = torch.from_numpy(values) if dtype is None else torch.from_numpy(values).to(dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def read(*columns: Tensor) -> list[list[int]]:
    """Whole numbers back on the host, in one transfer: 1-D tensors of one device, any lengths."""
    flat = torch.cat([column.long() for column in columns]).tolist()
    ends = np.cumsum([len(column) for column in columns]).tolist()
    return [flat[end - len(column) : end] for column, end in zip(columns, ends, strict=True)]
