"""EAGLE-3 in straight lines: no cache, no blocks, every row recomputed from the whole text. Written from the papers'
equations, shares nothing with the engine; float64.

Row i: token x[i + 1], streams h[i], angle i; its output proposes x[i + 2].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, base: float) -> Tensor:
    """x [T, heads, D], row i by angle i."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Straight:
    """One head: tensors by SafeAILab's names, and the facts of its config.

    facts   heads, kv_heads, eps, base; optional: window, residual_normed, feedback_normed, norms (0, 1 or streams)
    """

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor, **facts: Any) -> None:
        self.w = {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}
        self.embedding = embedding.double()
        self.facts = {"window": None, "residual_normed": False, "feedback_normed": False, "norms": 0, **facts}

    def fuse(self, streams: Tensor) -> Tensor:
        streams, norms, eps = streams.double(), self.facts["norms"], self.facts["eps"]
        if norms == 1:
            streams = rms(streams, self.w["input_norm.weight"], eps)
        elif norms:
            parts = streams.chunk(norms, -1)
            streams = torch.cat([rms(p, self.w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)], -1)
        return streams @ self.w["fc.weight"].T

    def forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T] and features [T, width] of rows 0.. -> scores [T, Vd] and the features that follow [T, width]."""
        w, eps, heads, groups = self.w, self.facts["eps"], self.facts["heads"], self.facts["kv_heads"]
        e = rms(self.embedding[tokens], w["midlayer.input_layernorm.weight"], eps)
        c = rms(features, w["midlayer.hidden_norm.weight"], eps)
        both = torch.cat([e, c], -1)

        def project(name: str, count: int) -> Tensor:
            x = both @ w[f"midlayer.self_attn.{name}_proj.weight"].T
            if f"midlayer.self_attn.{name}_proj.bias" in w:
                x = x + w[f"midlayer.self_attn.{name}_proj.bias"]
            x = x.view(len(tokens), count, -1)
            norm = f"midlayer.self_attn.{name}_norm.weight"
            return rms(x, w[norm], eps) if norm in w else x

        q, k = turn(project("q", heads), self.facts["base"]), turn(project("k", groups), self.facts["base"])
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, project("v", groups)))
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        i = torch.arange(len(tokens))
        seen = i[:, None] >= i
        if self.facts["window"]:
            seen &= i > i[:, None] - self.facts["window"]
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        y = (c if self.facts["residual_normed"] else features) + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        x = rms(y, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        z = y + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        last = rms(z, w["norm.weight"], eps)
        return last @ w["lm_head.weight"].T, last if self.facts["feedback_normed"] else z

    def rollout(self, ids: list[int], streams: Tensor, depth: int) -> tuple[list[int], list[float], Tensor]:
        """Drafts behind ids x[0..n], whose streams [n, F] are known for all but the last; their probabilities; the
        last scores."""
        tokens, features = list(ids[1:]), self.fuse(streams)
        drafts: list[int] = []
        shares: list[float] = []
        for _ in range(depth):
            scores, after = self.forward(torch.tensor(tokens), features)
            best = int(scores[-1].argmax())
            shares.append(float(scores[-1].softmax(-1)[best]))
            drafts.append(best + int(self.w["d2t"][best]) if "d2t" in self.w else best)
            tokens.append(drafts[-1])
            features = torch.cat([features, after[-1:]])
        return drafts, shares, scores[-1]
