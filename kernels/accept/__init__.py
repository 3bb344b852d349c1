"""The shared-noise choice of a token: argmax of logits / temperature + Gumbel noise that anyone can recompute.

The noise is a pure function of (seed, position, token id), so a draft and its target, or a run with speculation and
one without, make the same choice wherever their logits agree (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

Words and uniforms have the same bits in every engine. Their logarithms may differ in the last bit (float32; float64
toys do not show it), so an id may differ between engines where the two best scores lie within 4e-6 of each other;
within one engine it never depends on batch, drafts or splits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels import dispatch, native
from specdec.kernels.accept import kernel, reference
from specdec.kernels.accept.reference import (
    CHOICE_STREAM,
    COIN_STREAM,
    DRAFT_POSITIONS,
    Judgement,
    Rejection,
    noise,
    noise_of,
    perturbed,
)
from specdec.kernels.ahead_of_time import CompileCase

__all__ = [
    "CHOICE_STREAM",
    "COIN_STREAM",
    "DRAFT_POSITIONS",
    "Judgement",
    "Rejection",
    "accept",
    "compile_cases",
    "noise",
    "noise_of",
    "perturbed",
    "reject",
    "sample",
    "sample_host",
    "uses_native",
    "uses_triton",
]

TRITON_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_TRITON_VOCAB = 2**20


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose one token per row: argmax over v of logits / temperature + g(seed, position, v), ties to the lowest id.

    logits        [L, V]   float32, float64, bfloat16 or float16; -inf marks a token that may not be chosen
    seeds         [L]      int64
    positions     [L]      int64, of the token to choose, within its output
    temperatures  [L]      below 1e-5 there is no noise
    returns       token_ids [L] int64, is_finite [L] bool: False where a row holds NaN or +inf or only -inf, and then
                  the id is 0
    """
    assert logits.ndim == 2 and seeds.shape == positions.shape == temperatures.shape == logits.shape[:1]
    assert seeds.dtype == positions.dtype == torch.int64
    if uses_triton(logits):
        from specdec.kernels.accept import launch

        token_ids, is_finite = launch.sample(logits, seeds, positions, temperatures)
    else:
        implementation = kernel.sample if uses_native(logits) else reference.sample
        token_ids, is_finite = implementation(logits, seeds, positions, temperatures)
    if out is None:
        return token_ids, is_finite
    out[0].copy_(token_ids)
    out[1].copy_(is_finite)
    return out


def sample_host(
    logits: Tensor, seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]
) -> tuple[list[int], list[bool]]:
    """Choose as `sample` does, from numbers that lie on the host to numbers there; where `uses_native` only.

    seeds, positions, temperatures   [L]
    returns                          token ids [L] and whether scores were finite [L]
    """
    assert logits.ndim == 2 and len(seeds) == len(positions) == len(temperatures) == logits.shape[0]
    return kernel.sample_host(logits, seeds, positions, temperatures)


def accept(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, drafts: Tensor, bounds: Tensor
) -> Judgement:
    """Choose at every row and keep each request's longest prefix of drafts that equals the choices.

    logits        [L, V]    as in `sample`
    seeds         [L]
    positions     [L]
    temperatures  [L]
    drafts        [L]       int64, the draft placed behind each logits row; a request's last entry is not read
    bounds        [B + 1]   int32, ascending from 0 to L: request b owns rows bounds[b] to bounds[b + 1], none if padded
    returns       token_ids [L], num_accepted [B], next_ids [B], is_finite [B]

    ValueError names what does not fit.
    """
    _check(logits, drafts, bounds, seeds=seeds, positions=positions)
    _check_rows("temperatures", temperatures, logits)
    if not uses_triton(logits):
        return reference.accept(logits, seeds, positions, temperatures, drafts, bounds)
    from specdec.kernels.accept import launch

    return launch.accept(logits, seeds, positions, temperatures, drafts, bounds)


def reject(
    scores: Tensor, draft_probs: Tensor | None, seeds: Tensor, positions: Tensor, drafts: Tensor, bounds: Tensor
) -> Rejection:
    """Keep each request's drafts by classical rejection, and draw the token behind them.

    A draft d is kept with probability min(1, p(d) / q(d)), where p is the softmax of its row; at the first refused one
    the next token follows (p - q)+, behind the last it follows p. (Leviathan, Kalman, Matias 2023, arXiv 2211.17192,
    algorithm 1; Chen et al. 2023, arXiv 2302.01318.) The law of the output is p's whatever q is, if drafts were drawn
    from q with noise of their own: `sample` at positions + DRAFT_POSITIONS.

    scores        [L, V]    processed and divided by the temperature; -inf marks what may not be chosen
    draft_probs   [L, V]    q of the draft behind each row, its sum 1; None: every draft was certain (q is one-hot).
                            A request's last row has no draft and holds zeros; or q of one more that was drawn and
                            could not ride, which counts as refused
    seeds         [L]
    positions     [L]
    drafts        [L]       as in `accept`
    bounds        [B + 1]
    returns       num_accepted [B], next_ids [B], is_finite [B]

    ValueError names what does not fit.
    """
    _check(scores, drafts, bounds, seeds=seeds, positions=positions)
    if draft_probs is not None and (draft_probs.shape != scores.shape or draft_probs.device != scores.device):
        raise ValueError(
            f"draft_probs is {tuple(draft_probs.shape)} on {draft_probs.device}; scores are {tuple(scores.shape)} "
            f"on {scores.device}, and both must match"
        )
    probs_fit = draft_probs is None or draft_probs.stride(-1) == 1
    if not (probs_fit and uses_triton(scores)):
        return reference.reject(scores, draft_probs, seeds, positions, drafts, bounds)
    from specdec.kernels.accept import launch

    return launch.reject(scores, draft_probs, seeds, positions, drafts, bounds)


def uses_native(logits: Tensor) -> bool:
    """Say whether native code chooses among these scores."""
    return logits.is_cpu and logits.dtype in native.DTYPES and native.enabled()


def uses_triton(logits: Tensor) -> bool:
    """Say whether these scores are judged by the Triton engine."""
    return dispatch.wants_triton(logits, _refusal(logits))


def compile_cases(space: bool = False) -> list[CompileCase]:
    """Return what must compile ahead of time; there is no search space."""
    from specdec.kernels.accept.configurations import all_cases

    return all_cases(space)


def _refusal(logits: Tensor) -> str | None:
    """Say why the Triton engine cannot take these scores."""
    if logits.dtype not in TRITON_DTYPES:
        return f"logits are {logits.dtype}; the kernels of `accept` know {', '.join(map(str, TRITON_DTYPES))}"
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        return f"logits have a stride of {logits.stride(1)} between ids; the kernels of `accept` need 1"
    if logits.shape[1] > MOST_TRITON_VOCAB:
        return f"the vocabulary has {logits.shape[1]} ids; the kernels of `accept` take at most {MOST_TRITON_VOCAB}"
    return None


def _check(logits: Tensor, drafts: Tensor, bounds: Tensor, **streams: Tensor) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}; they must be floats [L, V]")
    if bounds.ndim != 1 or not len(bounds) or bounds.dtype != torch.int32 or bounds.device != logits.device:
        raise ValueError(
            f"bounds are {bounds.dtype} of shape {tuple(bounds.shape)} on {bounds.device}; they must be int32 [B + 1] "
            f"on {logits.device}"
        )
    for name, x in {"drafts": drafts, **streams}.items():
        _check_rows(name, x, logits)
        if x.dtype != torch.int64:
            raise ValueError(f"{name} are {x.dtype}; they must be int64")


def _check_rows(name: str, x: Tensor, logits: Tensor) -> None:
    if x.shape != logits.shape[:1] or x.device != logits.device or not x.is_contiguous():
        raise ValueError(
            f"{name} have shape {tuple(x.shape)} and strides {x.stride()} on {x.device}; one contiguous entry is "
            f"needed for each of the {logits.shape[0]} logits rows on {logits.device}"
        )
