"""Optimisers: Muon for the matrices of the layer, AdamW for the rest, and a running mean of the weights.

It knows parameters by shape and name. (Muon: Jordan et al. 2024; the scale that gives an update AdamW's size:
Liu et al. 2025, arXiv 2502.16982.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from draft_models.precision import choose


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal (Newton-Schulz) before they are added.

    torch's own does this in bf16, which a CPU without bf16 instructions pays for with most of the step; here it is
    done in bf16 where that is an instruction.
    """

    def __init__(self, parameters: Iterable[Any], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for settings in self.param_groups:
            for p in settings["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - settings["momentum"])
                update = orthogonal(p.grad.lerp(velocity, settings["momentum"]))
                p.add_(update, alpha=-settings["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix with equal singular values, roughly (the quintic of Jordan et al. 2024)."""
    x = matrix.to(choose("auto", matrix.device))
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    whole: Tensor = x.T if is_tall else x
    return whole.to(matrix.dtype)


def build(model: nn.Module, muon_rate: float, adam_rate: float, fc_scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Muon over every matrix but the output head and embeddings, AdamW over those and the vectors.

    fc_scale   on the rate of `fc`, whose inputs are raw features of any size: one over their root mean square
    """
    inner: list[Tensor] = []
    fc: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_inner = parameter.ndim == 2 and "lm_head" not in name and "embed" not in name
            (fc if is_inner and name.endswith("fc.weight") else inner if is_inner else others).append(parameter)
    groups = [{"params": inner, "lr": muon_rate}, {"params": fc, "lr": muon_rate * fc_scale}]
    optimisers: list[torch.optim.Optimizer] = [Muon([g for g in groups if g["params"]], muon_rate)]
    if others:
        optimisers.append(torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    for optimiser in optimisers:
        for settings in optimiser.param_groups:
            settings["base_rate"] = settings["lr"]
    return optimisers


def set_rate(optimisers: Iterable[Any], factor: float) -> None:
    """Scale every learning rate from its own base."""
    for optimiser in optimisers:
        for settings in optimiser.param_groups:
            settings["lr"] = settings["base_rate"] * factor


def rate_factor(step: int, share_done: float, warmup: int = 10, cooldown: float = 0.25) -> float:
    """Up over `warmup` steps, level, then down in a line to 5 % over the last `cooldown` share of the run."""
    down = min(1.0, max(0.0, 1.0 - share_done) / cooldown)
    return min(1.0, (step + 1) / warmup) * max(0.05, down)


class RunningMean:
    """An exponential mean of a model's weights: what is saved and measured while training goes on."""

    def __init__(self, model: nn.Module, most: float = 0.98) -> None:
        self.most, self.updates = most, 0
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one step of weights in."""
        self.updates += 1
        keep = min(self.most, (1 + self.updates) / (10 + self.updates))
        for name, value in model.state_dict().items():
            self.values[name].lerp_(value.to(self.values[name].dtype), 1 - keep)

    def state(self) -> dict[str, Any]:
        """What resuming needs."""
        return {"updates": self.updates, "values": self.values}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        values: dict[str, Tensor] = state["values"]
        self.updates, self.values = state["updates"], dict(values)
