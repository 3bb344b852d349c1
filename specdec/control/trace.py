"""Trace: what the controller decided and what came of it, one JSON line a step, and the sums of all steps.

It knows numbers and one file; it decides nothing. A full disk ends the trace, never a request.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TextIO

from specdec.batch import NO_OFFER, Batch, Offer, Verdict
from specdec.errors import InvalidRequestError

logger = logging.getLogger("specdec")
MEMORY = 0.98


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One request in one step.

    budgeted   drafts there was room for
    drafted    drafts offered
    admitted   drafts verified
    accepted   drafts the target agreed to
    gain       accepted drafts that were expected of the admitted
    chances    the conditional chance of each admitted draft, as it was believed
    """

    request_id: str
    source: str
    budgeted: int
    drafted: int
    admitted: int
    accepted: int
    gain: float
    chances: tuple[float, ...] = ()


def row_records(
    batch: Batch, verdict: Verdict, offers: Mapping[str, tuple[Offer, Sequence[float]]]
) -> tuple[RowRecord, ...]:
    """Of the rows that decode.

    offers   request -> what was offered, and the chances of what was admitted of it
    """
    records = []
    for index, row in enumerate(batch):
        if row.chooses and row.num_base == 1:
            offer, own = offers.get(row.request.request_id, (NO_OFFER, ()))
            drafted, admitted = len(offer.token_ids), len(row.draft_token_ids)
            accepted, gain = verdict.num_accepted(index), sum(accumulate(own, mul))
            records.append(
                RowRecord(
                    row.request.request_id, offer.source, row.max_drafts, drafted, admitted, accepted, gain, tuple(own)
                )
            )  # fmt: skip
    return tuple(records)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    kind        "plan", "zero", "prompts" (nobody decodes), "probe" (drafts, to learn) or "plain probe" (none, to learn)
    decoding    rows that decode; prompts: prompt tokens computed beside them
    keys        cached tokens read
    predicted   seconds the step was expected to take; verify and draft: what its parts took
    rate        expected tokens per second of the chosen shape; plain_rate: without drafts
    """

    step: int
    kind: str
    decoding: int
    prompts: int
    keys: int
    tokens: int
    predicted: float
    draft: float
    verify: float
    rate: float
    plain_rate: float
    rows: tuple[RowRecord, ...] = ()


@dataclass(slots=True)
class Totals:
    """Sums over the steps of an engine.

    ratio     predicted over real seconds, an average that forgets; 0 before the first step
    lengths   how many rows were verified with so many drafts
    """

    num_steps: int = 0
    num_zero_steps: int = 0
    num_probes: int = 0
    num_changes: int = 0
    ratio: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)

    def time(self, predicted: float, real: float) -> None:
        """One more pair of seconds."""
        now = predicted / real if real > 0 else 1.0
        self.ratio = now if self.ratio == 0.0 else MEMORY * self.ratio + (1.0 - MEMORY) * now


class TraceFile:
    """A file of step records; opened at once, so that a bad path is an error at start."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        try:
            self._file: TextIO | None = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"trace {path} cannot be written: {error}", param="trace") from error

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(asdict(record)) + "\n")
            self._file.flush()
        except OSError:
            logger.exception("the trace %s could not be written and ends here; requests are not affected", self.path)
            self._file = None
