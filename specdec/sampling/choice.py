"""Choice: one row of scores, whose output position it decides, and what it may know.

It reads the request and never changes it: what drafts would add to counts or history lives here only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.token_counts import Ints


def is_plain(request: Request) -> bool:
    """True where scores are scaled and no more, at every position, and nothing is to be told of them."""
    params, rules = request.params, request.rules
    if request.grammar is not None or rules.always_edits or rules.min_tokens or params.logprobs is not None:
        return False
    return params.is_greedy or not filters(params)


def filters(params: SamplingParams) -> bool:
    """True where min_p, top_k or top_p may remove tokens."""
    return params.top_k > 0 or params.top_p < 1.0 or bool(params.min_p)


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of scores.

    position        0 for the first token behind the prompt
    drafts_before   drafts of this step between the committed output and this position
    """

    request: Request
    position: int
    drafts_before: tuple[int, ...] = ()

    @property
    def is_edited(self) -> bool:
        """True where scores change before the temperature is applied."""
        return self.request.grammar is not None or self.request.rules.edits(self.position)

    @property
    def is_filtered(self) -> bool:
        """True where min_p, top_k or top_p remove tokens."""
        params = self.request.params
        return not params.is_greedy and filters(params)

    def grammar_mask(self) -> NDArray[np.uint8]:
        """What the request's grammar allows here, one bit a token id."""
        assert self.request.grammar is not None
        return self.request.grammar.mask(self.drafts_before)

    def banned(self) -> Ints:
        """Ids that may not be chosen here."""
        rules = self.request.rules
        return rules.banned(self.position, self._last(rules.longest_bad_word))

    def counts(self) -> tuple[Ints, Ints]:
        """Ids seen before this position and how often they were emitted; penalised requests only."""
        assert self.request.counts is not None
        return self.request.counts.with_drafts(self.drafts_before)

    def _last(self, size: int) -> list[int]:
        """At most `size` of the latest output tokens, drafts included."""
        if size == 0:
            return []
        committed = self.request.token_ids[max(self.request.num_prompt_tokens, self.request.num_tokens - size) :]
        return [*committed, *self.drafts_before][-size:]
