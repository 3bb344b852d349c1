"""What a step's calls of attention on a GPU have in common: the lists of what is to be computed, as values.

Knows neither Triton nor how the lists are made.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WorkLists:
    """What the kernels of one step (and window) walk over; all int32, on the device.

    verify_items    [3, C]    row, tile, split of every piece of verification
    prefill_items   [2, C']   row, tile of every tile of a prompt chunk
    num_items       [2]       how many of each there are
    token_rows      [T]       the row a token belongs to; B for padding
    row_slots       [B]       token t of a row keeps its part of split s at row_slots + s * query_len + t
    num_slots                 most of those
    """

    verify_items: Tensor
    prefill_items: Tensor
    num_items: Tensor
    token_rows: Tensor
    row_slots: Tensor
    num_slots: int


@dataclass(slots=True)
class StepLists:
    """Work lists that the layers of one step share; whoever owns it makes a new one when lengths change."""

    made: dict[tuple[int, ...], WorkLists] = field(default_factory=dict)
