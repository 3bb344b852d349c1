"""What a caller gets back: one RequestOutput a prompt, one CompletionOutput a choice.

Plain values; they know nothing of the engine that made them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.logprobs import TokenLogprob
from specdec.request import RequestStats


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    finish_reason   "stop", "length", "abort" or "error"
    error           what went wrong, when finish_reason is "error"
    logprobs        one value for each of token_ids; None: not asked for
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass(slots=True)
class RequestOutput:
    """All choices of one prompt.

    prompt            the text given; None when token ids were given
    prompt_logprobs   one value for each prompt token, None for the first; None: not asked for
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def stats(self) -> RequestStats:
        """What speculation did, summed over the choices."""
        total = RequestStats()
        for output in self.outputs:
            total.add(output.stats)
        return total
