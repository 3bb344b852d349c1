"""Sampling: from scores to tokens, by the one rule that plain decoding and verification share.

It knows each row's request, its parameters and its noise. It knows no models, caches or queues.
"""

from specdec.sampling.choice import Choice
from specdec.sampling.sampler import choose
from specdec.sampling.verify import verify

__all__ = ["Choice", "choose", "verify"]
