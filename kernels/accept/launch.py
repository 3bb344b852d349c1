"""The Triton engine of `sample`, `accept` and `reject`: launches and scratch.

No value of a device tensor is read here, so a CUDA graph can hold all of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.accept.choosing import choose_kernel, finish_kernel, judge_kernel
from specdec.kernels.accept.reference import Judgement, Rejection
from specdec.kernels.accept.rejecting import coin_kernel, normalise_kernel, recover_kernel, residual_kernel

TILE = 4096  # ids a program owns; a multiple of 4, since a counter of the noise yields four words
NUM_WARPS = 8
ROWS = 16  # logits rows judged at once: a request with up to 15 drafts needs one pass


def wide_type(dtype: torch.dtype) -> tl.dtype:
    """What scores of this dtype are computed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def tiles_of(vocab_size: int) -> int:
    """Tiles of a row."""
    return -(-vocab_size // TILE)


def _scratch(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _choose(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The best score and id of every tile: [L, S] each."""
    num_rows, vocab_size = logits.shape
    num_tiles = tiles_of(vocab_size)
    tops = _scratch(logits, num_rows, num_tiles)
    ids = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    if num_rows:
        choose_kernel[(num_rows, num_tiles)](
            logits, seeds, positions, temperatures, tops, ids, logits.stride(0), vocab_size, num_tiles,
            WIDE=wide_type(logits.dtype), TILE=TILE, num_warps=NUM_WARPS,
        )  # fmt: skip
    return tops, ids


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """As the twin; the last dimension of logits is contiguous."""
    num_rows = len(logits)
    tops, ids = _choose(logits, seeds, positions, temperatures)
    token_ids = seeds.new_empty(num_rows)
    is_finite = seeds.new_empty(num_rows, dtype=torch.bool)
    if num_rows:
        num_tiles = tops.shape[1]
        finish_kernel[(-(-num_rows // ROWS),)](
            tops, ids, token_ids, is_finite, num_rows, num_tiles, S_POW2=triton.next_power_of_2(num_tiles), ROWS=ROWS
        )
    return token_ids, is_finite


def accept(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, drafts: Tensor, bounds: Tensor
) -> Judgement:
    """As the twin."""
    tops, ids = _choose(logits, seeds, positions, temperatures)
    num_requests, num_tiles = len(bounds) - 1, tops.shape[1]
    token_ids = seeds.new_empty(len(logits))
    num_accepted = bounds.new_empty(num_requests)
    next_ids = seeds.new_empty(num_requests)
    is_finite = bounds.new_empty(num_requests, dtype=torch.bool)
    if num_requests:
        judge_kernel[(num_requests,)](
            tops, ids, drafts, bounds, token_ids, num_accepted, next_ids, is_finite, num_tiles,
            S_POW2=triton.next_power_of_2(num_tiles), ROWS=ROWS,
        )  # fmt: skip
    return Judgement(token_ids, num_accepted, next_ids, is_finite)


def reject(
    scores: Tensor, draft_probs: Tensor | None, seeds: Tensor, positions: Tensor, drafts: Tensor, bounds: Tensor
) -> Rejection:
    """As the twin."""
    (num_rows, vocab_size), num_requests = scores.shape, len(bounds) - 1
    num_tiles = tiles_of(vocab_size)
    wide, pow2 = wide_type(scores.dtype), triton.next_power_of_2(num_tiles)
    row_tops, row_sums = _scratch(scores, num_rows, num_tiles), _scratch(scores, num_rows, num_tiles)
    log_sums = _scratch(scores, num_rows)
    tops = _scratch(scores, num_requests, 2, num_tiles)
    ids = scores.new_empty(num_requests, 2, num_tiles, dtype=torch.int32)
    num_accepted, next_ids = bounds.new_empty(num_requests), seeds.new_empty(num_requests)
    is_finite = bounds.new_empty(num_requests, dtype=torch.bool)
    probs = scores if draft_probs is None else draft_probs
    strides = scores.stride(0), probs.stride(0)
    is_certain = draft_probs is None
    if num_requests and num_rows:
        normalise_kernel[(num_rows, num_tiles)](
            scores, row_tops, row_sums, strides[0], vocab_size, num_tiles, WIDE=wide, TILE=TILE, num_warps=NUM_WARPS
        )
        coin_kernel[(num_requests,)](
            scores, probs, drafts, seeds, positions, row_tops, row_sums, log_sums, bounds, num_accepted, is_finite,
            *strides, num_tiles, WIDE=wide, S_POW2=pow2, IS_CERTAIN=is_certain, num_warps=1,
        )  # fmt: skip
        residual_kernel[(num_requests, num_tiles)](
            scores, probs, drafts, seeds, positions, log_sums, bounds, num_accepted, tops, ids,
            *strides, vocab_size, num_tiles, WIDE=wide, TILE=TILE, IS_CERTAIN=is_certain, num_warps=NUM_WARPS,
        )  # fmt: skip
        recover_kernel[(num_requests,)](tops, ids, bounds, is_finite, next_ids, num_tiles, S_POW2=pow2, num_warps=1)
    return Rejection(num_accepted, next_ids, is_finite)
