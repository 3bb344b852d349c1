"""Tensors of a checkpoint directory by name, without building a module.

It knows safetensors files and PyTorch's own; it does not know what a tensor means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelLoadError where it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return values


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of a directory; safetensors files are not read beyond their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with _open(file) as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    if not shapes:
        shapes = {name: tuple(tensor.shape) for name, tensor in _pickled(path).items()}
    return shapes


def read_tensors(path: Path, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a directory as they are stored; all of them, or those of these names that are there."""
    tensors: dict[str, Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with _open(file) as opened:
            wanted = set(opened.keys()) & set(names) if names is not None else opened.keys()
            tensors |= {name: opened.get_tensor(name) for name in wanted}
    if not files:
        tensors = {k: v for k, v in _pickled(path).items() if names is None or k in names}
    return tensors


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is no whole safetensors file: {error}") from error


def _pickled(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("pytorch_model*.bin")):
        try:
            loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ModelLoadError(f"{file} cannot be read as plain tensors: {error}") from error
        tensors |= {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    return tensors
