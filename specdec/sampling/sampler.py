"""The shared-noise sampler: y_t = argmax(log p_t + g_t), with g_t fixed by (seed, t, token id).

Plain decoding, verification and drafting all choose here, so that the same request meets the same
noise at the same output position whoever asks. It knows parameters and scores, not why a row is asked.
(Gumbel coupling: Daliri, Musco, Suresh 2024, arXiv 2408.07978.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.accept import sample
from specdec.request import Request
from specdec.sampling.filters import filter_rows


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of scores and whose output position it decides.

    position   0 for the first token behind the prompt
    """

    request: Request
    position: int

    @property
    def is_filtered(self) -> bool:
        """True where top_k or top_p remove tokens."""
        params = self.request.params
        return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0)


def choose(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], list[bool]]:
    """Choose one token for every row of scores.

    logits   [L, V]   any floating type; computed in float32, or float64 where the model is
    returns  token ids [L] and, for each row, whether its scores were finite

    This reads the result back: it is the one synchronisation of a step.
    """
    if not choices:
        return [], []
    scores = logits if logits.dtype == torch.float64 else logits.float()
    temperatures = [c.request.params.temperature for c in choices]
    filtered = [i for i, c in enumerate(choices) if c.is_filtered]
    if filtered:
        scores = _apply_filters(scores, choices, temperatures, filtered)
    token_ids, is_finite = sample(
        scores,
        torch.tensor([c.request.noise_seed for c in choices], dtype=torch.int64, device=scores.device),
        torch.tensor([c.position for c in choices], dtype=torch.int64, device=scores.device),
        torch.tensor(temperatures, dtype=scores.dtype, device=scores.device),
    )
    return token_ids.tolist(), is_finite.tolist()


def _apply_filters(scores: Tensor, choices: Sequence[Choice], temperatures: list[float], filtered: list[int]) -> Tensor:
    """Mask the rows that ask for it; their temperature is applied here, so the sampler sees 1."""
    index = torch.tensor(filtered, device=scores.device)
    scale = torch.tensor([temperatures[i] for i in filtered], dtype=scores.dtype, device=scores.device)
    params = [choices[i].request.params for i in filtered]
    kept = filter_rows(scores[index] / scale[:, None], [p.top_k for p in params], [p.top_p for p in params])
    for i in filtered:
        temperatures[i] = 1.0
    return scores.index_copy(0, index, kept)
