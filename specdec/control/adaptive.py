"""The adaptive controller: acceptance estimates times a cost model, planned over the whole batch each step.

It knows requests, offers and seconds, in integers and floats; it knows no tensors. It speaks twice,
before drafting (`prepare` and `budget`) and after (`admit`), and hears what came of it (`observe`).

Tokens per second are counted over decoding alone: the prompt tokens of a step will have to be
computed whatever is drafted, so drafts pay for what they add to the step they ride in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.batch import Batch, Drafts, Offer, Plan, Row, StepSeconds, Verdict
from specdec.control.acceptance import Acceptance, running_product
from specdec.control.cost import ForwardCost
from specdec.control.planning import Costs, Shape, best_shape, shapes_by_depth
from specdec.control.probing import Probes, small_probe
from specdec.control.trace import RowRecord, StepRecord, Totals, TraceFile
from specdec.controller import FixedLength, attach
from specdec.request import Request

MARGIN = 0.02  # how much better another depth must be before the depth changes
ZERO_STEPS = 32  # at zero the plan is looked at again after so many steps, or when the load has fallen
LOAD_FELL = 0.75
JOIN_STEPS = 8  # or after so many, when a request has joined
LEARN_EVERY = 8  # at zero the cost model looks at one step in so many
OPENING_STEPS = 32  # catching up is paid back over so many steps


@dataclass(frozen=True, slots=True)
class Sources:
    """Who may draft.

    free     proposers that cost nothing to ask
    costly   the one that runs a model, if any
    lag      request -> tokens the costly one must compute before it can draft, the last known one included
    looks    False where only what is known before the draw may decide (acceptance "rejection")
    """

    free: tuple[str, ...] = ()
    costly: str | None = None
    lag: Callable[[Request], int] = lambda request: 1
    looks: bool = True


class AdaptiveLength:
    """Chooses every row's draft length each step.

    limits        the most that may be asked for: the engine's, the request's, the draft's own length
    verify        cost of the target's forwards; draft: of the draft's, where a model drafts
    most_tokens   of a step
    """

    def __init__(
        self,
        limits: FixedLength,
        sources: Sources,
        verify: ForwardCost,
        draft: ForwardCost | None = None,
        *,
        most_tokens: int = 512,
        trace: TraceFile | None = None,
    ) -> None:
        self.most_tokens = most_tokens
        self.limits = limits
        self.sources = sources
        self.verify = verify
        self.draft = draft
        self.trace = trace
        self.acceptance = Acceptance()
        self.probes = Probes()
        self.totals = Totals()
        self.step = 0
        self.depth = 0
        self._kind = "zero"
        self._shape: Shape | None = None
        self._plain_rate = 0.0
        self._room: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._lags: dict[str, int] = {}
        self._offers: dict[str, tuple[Offer, list[float]]] = {}
        self._sleeps_until = 0
        self._slept_at = 0
        self._slept_from = 0
        self._newest: Request | None = None

    # ------------------------------------------------------------------ before drafting

    def prepare(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Choose the depth of every running request for the step that comes."""
        self.step += 1
        if self.step < self._sleeps_until and self._is_as_before(running):
            return
        self._room, self._asked, self._lags, self._offers = {}, {}, {}, {}
        decoding = [r for r in running if r.num_owed_tokens == 1]
        if not decoding:
            self._sleeps_until = 0
            self._kind, self._shape = "zero", None
            return
        owed = sum(r.num_owed_tokens for r in running) - len(decoding) + sum(r.num_owed_tokens for r in waiting[:16])
        self._newest = running[-1]
        self._plan(decoding, min(owed, max(self.most_tokens - len(decoding), 0) // 2))
        self._prune(running, waiting)

    def _is_as_before(self, running: Sequence[Request]) -> bool:
        """At zero: the load has not fallen, and nobody new has waited long to be looked at."""
        if len(running) <= LOAD_FELL * self._slept_at:
            return False
        return self.step < self._slept_from + JOIN_STEPS or (bool(running) and running[-1] is self._newest)

    def _plan(self, decoding: Sequence[Request], prompts: int) -> None:
        able = [(r, most) for r in decoding if (most := min(self.limits.budget(r), r.max_drafts)) > 0]
        base = _Load(len(decoding), sum(r.num_tokens for r in decoding), prompts)
        free = self._weigh(able, base, self.sources.free, is_free=True)
        costly = self._weigh(able, base, (self.sources.costly,) if self.sources.costly else (), is_free=False)
        plain = free[0] if free else costly[0] if costly else None
        self._kind, self._shape, self._sleeps_until = "zero", plain, 0
        if plain is None:
            self._change_depth(0)
            return
        self._plain_rate = plain.rate
        shape = self._settle(max(free, key=_rate, default=plain), costly or [plain])
        shape = self._probe(shape, plain, [most for _, most in able], base)
        if not shape.num_drafts:
            self._rest(len(decoding), shape)
            return
        self._shape, self._sleeps_until = shape, 0
        self._give_room(able, shape, free, prompts)

    def _weigh(
        self, able: Sequence[tuple[Request, int]], load: _Load, sources: Sequence[str], *, is_free: bool
    ) -> list[Shape]:
        """The best shape of each depth, drafted by these proposers; the plain one first."""
        if not sources or not able:
            return []
        ladders = [self._ladder(request, most, sources) for request, most in able]
        if is_free or self.draft is None:
            return shapes_by_depth(load.decoding, ladders, Costs(load.verifying(self.verify)))
        for request, _ in able:
            self._lags[request.request_id] = self.sources.lag(request)
        behind = sum(max(self._lags[request.request_id] - 2, 0) for request, _ in able)
        opening = self.draft.at(behind) / OPENING_STEPS
        return shapes_by_depth(load.decoding, ladders, Costs(load.verifying(self.verify), self.draft.at, opening))

    def _ladder(self, request: Request, most: int, sources: Sequence[str]) -> list[float]:
        """S of a request, by the proposer from which most is expected."""
        ladders = [
            running_product(self.acceptance.chances(request.request_id, source, most, self.step)) for source in sources
        ]
        return max(ladders, key=sum)

    def _settle(self, free: Shape, costly: Sequence[Shape]) -> Shape:
        """The best shape, or the one of the depth that is served now where the best is hardly better."""
        best = max([free, *costly], key=_rate)
        if best.max_depth == self.depth or not best.num_drafts:
            return best
        now = [shape for shape in (free, *costly) if shape.max_depth == self.depth]
        kept = max(now, key=_rate, default=None)
        return best if kept is None or best.rate > kept.rate * (1.0 + MARGIN) else kept

    def _probe(self, shape: Shape, plain: Shape, most: Sequence[int], load: _Load) -> Shape:
        """Now and then something else, to learn; what that may cost is bounded."""
        self._kind = "plan" if shape.num_drafts else "zero"
        if shape.num_drafts:
            loss = max(shape.rate / plain.rate - 1.0, 0.0)
            if self.probes.plain_is_due(self.step, load.decoding, loss):
                self._kind = "plain probe"
                return Shape((0,) * len(shape.depths), 0.0, plain.seconds, plain.rate)
        else:
            lags = list(self._lags.values()) or [0] * len(most)
            small = small_probe(self.step, most, lags)
            seconds = self._seconds_of(small, lags, load)
            if self.probes.draft_is_due(self.step, max(seconds / plain.seconds - 1.0, 0.0)):
                self._kind = "probe"
                return Shape(small, 0.0, seconds, load.decoding / seconds)
        return shape

    def _seconds_of(self, depths: Sequence[int], lags: Sequence[int], load: _Load) -> float:
        """What a step with these depths takes, catching up in full."""
        seconds = load.verifying(self.verify)(sum(depths))
        if self.draft is not None and self.sources.costly is not None:
            seconds += sum(self.draft.at(sum(d > j for d in depths)) for j in range(1, max(depths)))
            seconds += self.draft.at(sum(lag for lag, depth in zip(lags, depths, strict=True) if depth))
        return seconds

    def _rest(self, num_decoding: int, shape: Shape) -> None:
        """No drafts in this step; at zero, none in those behind it either until something changes."""
        self._change_depth(0)
        self._shape = shape
        if self._kind == "zero":
            self._sleeps_until = min(self.step + ZERO_STEPS, max(self.probes.next_draft, self.step + 1))
            self._slept_at, self._slept_from = num_decoding, self.step

    def _change_depth(self, depth: int) -> None:
        if self._kind in ("probe", "plain probe"):
            return
        self.totals.num_changes += depth != self.depth
        self.depth = depth

    def _give_room(
        self, able: Sequence[tuple[Request, int]], shape: Shape, free: Sequence[Shape], prompts: int
    ) -> None:
        """Room by the plan; a free offer may use all there is, unless prompts wait for it."""
        self._change_depth(shape.max_depth)
        is_planned = self._kind == "probe" or not self.sources.looks or bool(prompts) or not self.sources.free
        for (request, most), depth in zip(able, shape.depths, strict=True):
            room = depth if is_planned else most
            if room:
                self._room[request.request_id] = room
                self._asked[request.request_id] = depth

    def budget(self, request: Request) -> int:
        """Most drafts for this request in the step that was prepared."""
        return self._room.get(request.request_id, 0) if self._room else 0

    # ------------------------------------------------------------------ between several proposers

    def choose(self, row: Row, offers: Sequence[Offer]) -> int:
        """The offer from which most accepted drafts are expected; the earlier one of equals."""
        return max(range(len(offers)), key=lambda i: sum(self._offer_ladder(row, offers[i])))

    def wants_model_draft(self, row: Row, free: Offer) -> int:
        """How many drafts to ask of the model: what was planned, unless the free offer makes it a waste."""
        if self.sources.costly is None or self.draft is None:
            return 0
        request_id = row.request.request_id
        asked = min(self._asked.get(request_id, 0), row.max_drafts)
        if asked and free.token_ids:
            chances = self.acceptance.chances(request_id, self.sources.costly, asked, self.step)
            more = sum(running_product(chances)) - sum(self._offer_ladder(row, free))
            rows = max(len(self._asked), 1)
            price = asked * self.draft.at(rows) / rows * (self._shape.rate if self._shape else 0.0)
            asked = asked if more > price else 0
        self._asked[request_id] = asked
        return asked

    def _offer_chances(self, row: Row, offer: Offer) -> list[float]:
        request_id, most = row.request.request_id, min(len(offer.token_ids), row.max_drafts)
        if offer.confidences and self.sources.looks:
            return self.acceptance.chances_of(request_id, offer.source, offer.confidences[:most], self.step)
        return self.acceptance.chances(request_id, offer.source, most, self.step)

    def _offer_ladder(self, row: Row, offer: Offer) -> list[float]:
        return running_product(self._offer_chances(row, offer))

    # ------------------------------------------------------------------ after drafting

    def admit(self, plan: Plan, drafts: Drafts) -> Batch:
        """Keep the drafts that are worth verifying; where looking is not allowed, all that were planned."""
        offered = [(i, row, offer) for i, (row, offer) in enumerate(zip(plan, drafts, strict=True)) if offer.token_ids]
        if not offered:
            return Batch(plan.rows)
        chances = [self._offer_chances(row, offer) for _, row, offer in offered]
        if self.sources.looks and self._kind != "probe":
            depths: Sequence[int] = self._worthwhile(plan, chances)
        else:
            depths = [len(own) for own in chances]
        rows = list(plan.rows)
        for (i, row, offer), depth, own in zip(offered, depths, chances, strict=True):
            self._offers[row.request.request_id] = (offer, own[:depth])
            rows[i] = attach(row, offer.cut(depth))
        return Batch(tuple(rows))

    def _worthwhile(self, plan: Plan, chances: Sequence[Sequence[float]]) -> tuple[int, ...]:
        """Drafts of each offer that pay for their verification; what drafting took is spent already."""
        decoding = [row for row in plan if row.num_base == 1 and row.chooses]
        prompts = sum(row.num_base for row in plan) - len(decoding)
        load = _Load(len(decoding), sum(row.start for row in decoding), prompts)
        ladders = [running_product(own) for own in chances]
        verify, spent = load.verifying(self.verify), self._drafting_seconds(plan.rows)
        return best_shape(len(decoding), ladders, Costs(lambda drafts: verify(drafts) + spent)).depths

    def _drafting_seconds(self, rows: Sequence[Row]) -> float:
        sizes = self._passes(rows)
        return sum(self.draft.at(n) for n in sizes) if self.draft is not None else 0.0

    def _passes(self, rows: Sequence[Row]) -> list[int]:
        """Tokens of each of the costly proposer's passes in this step."""
        if self.draft is None or not self._asked:
            return []
        asked = [self._asked.get(row.request.request_id, 0) if row.max_drafts else 0 for row in rows]
        first = sum(
            (self._lags.get(row.request.request_id, 1) if row.chooses else row.num_base)
            for row, depth in zip(rows, asked, strict=True)
            if depth or row.num_base > 1
        )
        return [first, *(sum(depth > j for depth in asked) for j in range(1, max(asked, default=0)))]

    # ------------------------------------------------------------------ afterwards

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """Learn what the step cost and which drafts were right."""
        totals = self.totals
        totals.num_steps += 1
        is_plain = not any(row.draft_token_ids for row in batch)
        totals.num_zero_steps += is_plain
        if is_plain and not self._room and self.trace is None and totals.num_steps % LEARN_EVERY:
            return
        load = _Load.of(batch)
        predicted = self._learn_cost(batch, load, seconds, is_plain)
        totals.time(predicted, seconds.draft + seconds.verify)
        if not is_plain:
            self._learn_acceptance(batch, verdict)
        if self.trace is not None:
            self.trace.write(self._record(batch, verdict, load, predicted, seconds))

    def _learn_cost(self, batch: Batch, load: _Load, seconds: StepSeconds, is_plain: bool) -> float:
        """Returns the seconds that were expected."""
        tokens = batch.num_tokens
        predicted = self.verify.seconds(tokens, load.keys, load.prompts)
        self.verify.observe([tokens], seconds.verify, load.keys, load.prompts)
        if is_plain:
            self.probes.saw_plain(self.step, load.decoding)
        passes = self._passes(batch.rows)
        if passes and self.draft is not None:
            predicted += sum(self.draft.at(n) for n in passes)
            self.draft.observe(passes, seconds.draft)
        return predicted

    def _learn_acceptance(self, batch: Batch, verdict: Verdict) -> None:
        for index, row in enumerate(batch):
            drafted = len(row.draft_token_ids)
            if not row.max_drafts:
                continue
            self.totals.lengths[drafted] += 1
            if drafted and not verdict.failed[index]:
                accepted = verdict.num_accepted(index)
                outcomes = [True] * accepted + [False] * (accepted < drafted)
                offer, _ = self._offers.get(row.request.request_id, (Offer(), []))
                confidences = offer.confidences[: len(outcomes)]
                self.acceptance.learn(row.request.request_id, row.source, outcomes, confidences, self.step)

    def _record(
        self, batch: Batch, verdict: Verdict, load: _Load, predicted: float, seconds: StepSeconds
    ) -> StepRecord:
        rows = []
        for index, row in enumerate(batch):
            if row.chooses and row.num_base == 1:
                offer, own = self._offers.get(row.request.request_id, (Offer(), []))
                gain = sum(running_product(own))
                drafted, admitted = len(offer.token_ids), len(row.draft_token_ids)
                rows.append(
                    RowRecord(
                        row.request.request_id, offer.source, row.max_drafts, drafted, admitted,
                        verdict.num_accepted(index), gain, tuple(own),
                    )
                )  # fmt: skip
        rate = self._shape.rate if self._shape is not None else self._plain_rate
        return StepRecord(
            self.step, self._kind, load.decoding, load.prompts, load.keys, batch.num_tokens, predicted,
            seconds.draft, seconds.verify, rate, self._plain_rate, tuple(rows),
        )  # fmt: skip

    def _prune(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        if self.acceptance.num_requests > 2 * len(running) + 64:
            self.acceptance.keep({r.request_id for r in running} | {r.request_id for r in waiting})


def _rate(shape: Shape) -> float:
    return shape.rate


@dataclass(frozen=True, slots=True)
class _Load:
    """What a step computes besides drafts.

    decoding   rows with one token each; keys: cached tokens they read; prompts: prompt tokens beside them
    """

    decoding: int
    keys: int
    prompts: int

    @classmethod
    def of(cls, batch: Batch) -> _Load:
        """Of a batch that was served."""
        decoding = keys = prompts = 0
        for row in batch:
            keys += row.start
            if row.chooses and row.num_base == 1:
                decoding += 1
            else:
                prompts += row.num_base
        return cls(decoding, keys, prompts)

    def verifying(self, cost: ForwardCost) -> Callable[[int], float]:
        """Seconds of decoding with n drafts: alone, and what the drafts add beside the prompts."""
        base = self.decoding + self.prompts
        rest = cost.seconds(self.decoding, self.keys) - cost.at(base)
        return lambda drafts: cost.at(base + drafts) + rest
