"""Probing: when to do what is not believed best, to find out, and what that may cost.

It knows steps and losses; a loss is counted in plain steps. A probe is made once its loss has been
saved up, as a share of the steps since the last one, so probing never takes more than that share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARE, YOUNG_SHARE, YOUNG_STEPS = 0.006, 0.03, 100  # of all steps; more in the beginning
FEWEST_STEPS, FEWEST_PLAIN = 8, 24  # between two probes with drafts; between two without any
FIRST_CREDIT = 50  # steps credited at the start, so that little is believed for long
SURE, SURE_STEPS = 0.3, 10_000  # what was seen to be better by so much is doubted as little as after these steps
MOST_PATIENCE = 8  # times the wait, after probes of which no draft was right
SAME_LOAD = 0.75  # a plan serves other numbers of rows, between this part of its own and its inverse
ROWS_PART, MOST_DRAFTS = 8, 3  # a probe drafts for one row in eight, so deep


class Probes:
    """Remembers when each kind of step was last seen.

    next_draft   step at which the next probe with drafts can be afforded
    """

    def __init__(self) -> None:
        self.next_draft = 0
        self._last_draft = -FIRST_CREDIT
        self._last_plain: dict[int, int] = {}
        self._last_probe = -FIRST_CREDIT // 2  # without drafts, of any number of rows: they share what may be spent
        self._seen_plain: set[int] = set()
        self._last_model = -FIRST_CREDIT
        self._patience = 1

    def draft_is_due(self, step: int, loss: float) -> bool:
        """True where a probe with drafts can be afforded now; it is then taken to be made."""
        interval = self._patience * _interval(step, loss)
        self.next_draft = self._last_draft + interval
        if step < self.next_draft:
            return False
        self._last_draft = step
        self.next_draft = step + interval
        return True

    def found(self, num_accepted: int) -> None:
        """What a probe with drafts brought: where none was right the wait for the next is twice as long."""
        self._patience = 1 if num_accepted else min(2 * self._patience, MOST_PATIENCE)

    def plain_is_due(self, step: int, rows: int, loss: float) -> bool:
        """True where a step without drafts can be afforded, for about so many rows; it is then taken to be made."""
        size = rows.bit_length()
        last = self._last_plain.setdefault(size, step - FIRST_CREDIT // 2)
        is_sure = loss >= SURE and size in self._seen_plain
        wait = max(_interval(SURE_STEPS if is_sure else step, loss), FEWEST_PLAIN)
        if step < max(last, self._last_probe) + wait:
            return False
        self._last_probe = step
        return True

    def model_is_due(self, step: int, loss: float) -> bool:
        """True where asking a model can be afforded while free offers serve; it is then taken to be made."""
        if step < self._last_model + _interval(step, loss):
            return False
        self._last_model = step
        return True

    def saw_plain(self, step: int, rows: int) -> None:
        """A step without drafts was served, for whatever reason."""
        self._last_plain[rows.bit_length()] = step
        self._seen_plain.add(rows.bit_length())


class KeptPlan:
    """A plan that serves several steps, while about as many rows decode.

    until   the first step it does not serve; 0: there is none
    """

    def __init__(self) -> None:
        self.until = 0
        self._num_rows = 0

    def keep(self, until: int, num_rows: int) -> None:
        """Let the plan that was made for so many rows serve until then."""
        self.until, self._num_rows = until, num_rows

    def serves(self, step: int, num_rows: int) -> bool:
        """True where it is as good as a new one."""
        return step < self.until and SAME_LOAD * self._num_rows <= num_rows <= self._num_rows / SAME_LOAD


def _interval(step: int, loss: float) -> int:
    """Steps that pay for a loss."""
    share = SHARE + YOUNG_SHARE * YOUNG_STEPS / (YOUNG_STEPS + step)
    return max(FEWEST_STEPS, math.ceil(loss / share))


def small_probe(step: int, most: Sequence[int], lags: Sequence[int]) -> tuple[int, ...]:
    """Depths of a probe: a few rows, those that lag least, in turn where none does.

    most   drafts each row may have
    lags   tokens each row's draft lacks
    """
    count = max(1, len(most) // ROWS_PART)
    order = sorted(range(len(most)), key=lambda i: (lags[i], (i - step) % len(most)))
    chosen = set(order[:count])
    return tuple(min(own, MOST_DRAFTS) if i in chosen else 0 for i, own in enumerate(most))
