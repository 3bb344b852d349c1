"""The adaptive controller: acceptance estimates times a cost model, planned over the whole batch each step.

It knows requests, offers and seconds, in integers and floats; it knows no tensors. It speaks twice,
before drafting (`prepare` and `budget`) and after (`admit`), and hears what came of it (`observe`).

Tokens per second are counted over decoding alone: the prompt tokens of a step will have to be
computed whatever is drafted, so drafts pay for what they add to the step they ride in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, StepSeconds, Verdict
from specdec.control.acceptance import Acceptance
from specdec.control.asking import NOBODY, Asking, best_asking, net_gain, net_value
from specdec.control.beliefs import Beliefs, Heard, reached
from specdec.control.cost import ForwardCost
from specdec.control.load import Load, Sources, keeps_up
from specdec.control.planning import Costs, Shape, best_shape, shapes_by_depth, worthwhile
from specdec.control.probing import KeptPlan, Probes, small_probe
from specdec.control.step_cost import StepCost, pass_sizes
from specdec.control.trace import StepRecord, Totals, TraceFile, row_records
from specdec.controller import FixedLength, attach
from specdec.request import Request

MARGIN = 0.02  # how much better another level must be before the level changes
FREE = -1  # the level of drafts that cost nothing to make
ZERO_STEPS = 64  # at zero the plan is looked at again after so many steps, or when the load has fallen
LOAD_FELL = 0.75
JOIN_STEPS = 8  # or after so many, when a request has joined
LEARN_EVERY = 16  # at zero the cost model looks at one step in so many
KEPT_STEPS = 8  # a plan that leaves the depths to the offers serves so many steps
OPEN_PART = 3  # and where prompts want all of a step, they leave this part of it to drafts
SETTLED, SETTLED_EVERY = 32, 16  # after so many steps costs are learned from one step in so many
PLANNED = 6  # drafts of a row that a plan looks at which leaves the depths to the offers: deeper ones hardly decide it
OPENING_STEPS = 32  # catching up is paid back over so many steps


class AdaptiveLength:
    """Chooses every row's draft length each step.

    limits        the most that may be asked for: the engine's, the request's, the draft's own length
    verify        cost of the target's forwards; draft: of the draft's, where a model drafts
    most_tokens   of a step; most_rows: requests that run at once
    """

    def __init__(
        self,
        limits: FixedLength,
        sources: Sources,
        verify: ForwardCost,
        draft: ForwardCost | None = None,
        *,
        most_tokens: int = 512,
        most_rows: int = 64,
        trace: TraceFile | None = None,
    ) -> None:
        self.most_tokens = most_tokens
        self.most_rows = most_rows
        self.limits = limits
        self.sources = sources
        self.cost = StepCost(verify, draft)
        self.trace = trace
        self.acceptance = Acceptance()
        self.beliefs = Beliefs(self.acceptance, looks=sources.looks)
        self.heard = Heard()
        self.probes = Probes()
        self.totals = Totals()
        self.step = 0
        self.level = 0
        self._kind = "zero"
        self._is_plain = True
        self._shape: Shape | None = None
        self._plain_rate = 0.0
        self._room: dict[str, int] = {}  # where the plan says how much
        self._open = 0  # where the offers will say it: room of every row
        self._asked: dict[str, int] = {}
        self._lags: dict[str, int] = {}
        self._sleeps_until = 0
        self._slept_at = 0
        self._slept_from = 0
        self._newest: Request | None = None
        self._kept = KeptPlan()
        self._asking: tuple[int, Asking] | None = None

    # ------------------------------------------------------------------ before drafting

    def prepare(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Choose the depth of every running request for the step that comes."""
        self.step += 1
        if self.step < self._sleeps_until and self._is_as_before(running):
            return
        decoding = [r for r in running if r.num_owed_tokens == 1]
        joining = waiting[: max(self.most_rows - len(running), 0)]
        owed = sum(r.num_owed_tokens for r in (*running, *joining)) - len(decoding)
        self._asked = {}
        self.beliefs.admitted = {}
        for request in decoding:
            if request.num_output_tokens == 1:
                self._forget(request)
        if self._kept.serves(self.step, len(decoding)):
            self._open = self._open_room(len(decoding), owed)
            return
        self._room, self._open, self._lags = {}, 0, {}
        self._kept.until, self._asking = 0, None
        if not decoding:
            self._sleeps_until = 0
            self._kind, self._shape = "prompts", None
            return
        self._newest = running[-1]
        self._plan(decoding, owed)
        if self._open and self.sources.lag is keeps_up:
            self._kept.keep(self.step + KEPT_STEPS, len(decoding))
        self._prune(running, waiting)

    def _is_as_before(self, running: Sequence[Request]) -> bool:
        """At zero: the load has not fallen, and nobody new has waited long to be looked at."""
        if len(running) <= LOAD_FELL * self._slept_at:
            return False
        return self.step < self._slept_from + JOIN_STEPS or (bool(running) and running[-1] is self._newest)

    def _forget(self, request: Request) -> None:
        """Whoever went by a new request's name before."""
        self.acceptance.forget(request.request_id)
        self.heard.forget(request.request_id)
        self.beliefs.forget(request.request_id)

    def _open_room(self, num_decoding: int, owed: int) -> int:
        """Room of every row where the offers say how much they are worth: what the prompts leave, or a third."""
        left = max(self.most_tokens - num_decoding - owed, self.most_tokens // OPEN_PART) // num_decoding
        return max(min(left, self.limits.num_speculative_tokens), 1)

    def _plan(self, decoding: Sequence[Request], owed: int) -> None:
        prompts = min(owed, max(self.most_tokens - len(decoding), 0) // 2)
        able = [(r, most) for r in decoding if (most := min(self.limits.budget(r), r.max_drafts)) > 0]
        base = Load(len(decoding), sum(r.num_tokens for r in decoding), prompts)
        free = self._weigh(able, base, self.sources.free, is_free=True)
        costly = self._weigh(able, base, (self.sources.costly,) if self.sources.costly else (), is_free=False)
        self._kind, self._shape, self._sleeps_until = "zero", None, 0
        if not free and not costly:
            return
        plain = (free or costly)[0]
        self._plain_rate = plain.rate
        shape, level = self._settle(free or [plain], costly)
        self.totals.num_changes += level != self.level
        self.level = level
        shape = self._probe(shape, plain, [most for _, most in able], base)
        if not shape.num_drafts:
            self._rest(len(decoding), shape)
            return
        self._shape, self._sleeps_until = shape, 0
        if self._kind == "plan" and self.sources.looks and self.sources.free:
            self._open = self._open_room(len(decoding), owed)
        else:
            self._give_room(able, shape)

    def _weigh(
        self, able: Sequence[tuple[Request, int]], load: Load, sources: Sequence[str], *, is_free: bool
    ) -> list[Shape]:
        """The best shape of each depth, drafted by these proposers; the plain one first."""
        if not sources or not able:
            return []
        keeps = self.sources.looks and is_free
        deepest = PLANNED if keeps else self.limits.num_speculative_tokens if is_free else self.sources.deepest
        rows = [(r.request_id, min(most, deepest)) for r, most in able]
        ladders = [self.beliefs.before(name, most, sources, self.step, keeps=keeps) for name, most in rows]
        verify = self.cost.verifying(load, sum(map(len, ladders)))
        if is_free or self.cost.draft is None:
            plain, *drafting = shapes_by_depth(load.decoding, ladders, Costs(verify))
            return [plain, *(self._where_offered(shape, plain, able) for shape in drafting)]
        for request, _ in able:
            self._lags[request.request_id] = self.sources.lag(request)
        behind = sum(max(self._lags[request.request_id] - 2, 0) for request, _ in able)
        opening = self.cost.draft.at(behind) / OPENING_STEPS + self.cost.overhead
        return shapes_by_depth(load.decoding, ladders, Costs(verify, self.cost.drafting(len(able)), opening))

    def _where_offered(self, shape: Shape, plain: Shape, able: Sequence[tuple[Request, int]]) -> Shape:
        """A shape of free drafts, of which only some will be offered; looking for them takes its time in any case."""
        shares = [self.heard.share(r.request_id) for (r, _), depth in zip(able, shape.depths, strict=True) if depth]
        share = sum(shares) / max(len(shares), 1)
        seconds = plain.seconds + share * (shape.seconds - plain.seconds) + self.cost.overhead
        expected = share * shape.expected
        return Shape(shape.depths, expected, seconds, (plain.rate * plain.seconds + expected) / seconds)

    def _settle(self, free: Sequence[Shape], costly: Sequence[Shape]) -> tuple[Shape, int]:
        """The best shape, or the one of the level that is served now where the best is hardly better.

        A level is a depth where drafting costs passes; where it may be free there is but on and off, and whether
        the model is asked besides is found out when the free offers are known.
        """
        levels = {0: free[0]}
        if not self.sources.free:
            levels |= {shape.max_depth: shape for shape in costly}
        elif drafting := [*free[1:], *costly[1:]]:
            levels[FREE] = max(drafting, key=lambda shape: shape.rate)
        best = max(levels, key=lambda level: levels[level].rate)
        kept = levels.get(self.level)
        if best and kept is not None and levels[best].rate <= kept.rate * (1.0 + MARGIN):
            return kept, self.level
        return levels[best], best

    def _probe(self, shape: Shape, plain: Shape, most: Sequence[int], load: Load) -> Shape:
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

    def _seconds_of(self, depths: Sequence[int], lags: Sequence[int], load: Load) -> float:
        """What a step with these depths takes, catching up in full."""
        seconds = self.cost.verifying(load, sum(depths))[-1]
        if self.sources.costly is not None:
            behind = sum(lag for lag, depth in zip(lags, depths, strict=True) if depth)
            sizes = [behind, *(sum(d > j for d in depths) for j in range(1, max(depths)))]
            seconds += self.cost.passes(sizes)
        return seconds

    def _rest(self, num_decoding: int, shape: Shape) -> None:
        """No drafts in this step; at zero, none in those behind it either until something changes."""
        self._shape = shape
        if self._kind == "zero":
            self._sleeps_until = min(self.step + ZERO_STEPS, max(self.probes.next_draft, self.step + 1))
            self._slept_at, self._slept_from = num_decoding, self.step

    @property
    def _rests(self) -> bool:
        """Speculation is off, and was in the step before: what the host takes is what it takes without."""
        return self._kind == "zero" and self.step > self._slept_from + 1

    def _give_room(self, able: Sequence[tuple[Request, int]], shape: Shape) -> None:
        """Room by the plan."""
        for (request, _), depth in zip(able, shape.depths, strict=True):
            if depth:
                self._room[request.request_id] = depth
                if not self.sources.free:
                    self._asked[request.request_id] = depth

    def budget(self, request: Request) -> int:
        """Most drafts for this request in the step that was prepared."""
        if self._open:
            return max(min(self._open, self.limits.budget(request), request.max_drafts), 0)
        return self._room.get(request.request_id, 0) if self._room else 0

    @property
    def _is_on(self) -> bool:
        """Rows may draft in this step."""
        return bool(self._open or self._room)

    # ------------------------------------------------------------------ between several proposers

    def choose(self, row: Row, offers: Sequence[Offer]) -> int:
        """The offer from which most accepted drafts are expected; the earlier one of equals."""
        return max(range(len(offers)), key=lambda i: self.beliefs.expected(row, offers[i], self.step))

    def model_depths(self, rows: Sequence[Row], free: Sequence[Offer]) -> list[int]:
        """How many drafts to ask of the model for each row, now that the free offers are known."""
        depths = [0] * len(rows)
        able = [i for i, row in enumerate(rows) if row.max_drafts]
        if able and self.sources.costly is not None and self.cost.draft is not None:
            self.heard.note(rows, free)
            if self._kind == "probe":
                asked, depth = [i for i in able if not free[i].token_ids], self.sources.deepest
            else:
                asking = self._asking_of(rows, able, free)
                asked, depth = [able[r] for r in asking.rows], asking.depth
            for i in asked:
                depths[i] = min(depth, rows[i].max_drafts)
        self._asked = {row.request.request_id: depth for row, depth in zip(rows, depths, strict=True) if depth}
        return depths

    def _asking_of(self, rows: Sequence[Row], able: Sequence[int], free: Sequence[Offer]) -> Asking:
        """Whom to ask; where nobody has a free offer, what was found a step ago serves as long as the plan does."""
        if any(free[i].token_ids for i in able):
            return self._whom_to_ask(rows, able, free)
        if self._asking is None or self._asking[0] != len(able) or self.step >= self._kept.until:
            self._asking = (len(able), self._whom_to_ask(rows, able, free))
        asking = self._asking[1]
        if asking.gain < 0.0:  # a probe
            self._asking = None
        return asking

    def _whom_to_ask(self, rows: Sequence[Row], able: Sequence[int], free: Sequence[Offer]) -> Asking:
        """The rows for which the model's passes pay, or a probe of them where none do."""
        assert self.sources.costly is not None and self.cost.draft is not None
        load = Load.of(rows)
        most = [min(rows[i].max_drafts, self.sources.deepest) for i in able]
        size, deepest = len(able), max(most)
        names = [rows[i].request.request_id for i in able]
        given = [self.beliefs.of(rows[i], free[i], self.step) for i in able]
        longest = max(deepest, *map(len, given))  # lookups may offer more than the model is asked for
        verify = self.cost.verifying(load, sum(map(len, given)) + size * longest)
        base = best_shape(load.decoding, [reached(own) for own in given], Costs(verify))
        beside = verify[base.num_drafts :][: size * longest + 1 : size]
        extra = [(seconds - beside[0]) / size for seconds in beside]
        looks = self.sources.looks
        chances = self.acceptance.cases(names, self.sources.costly, deepest, self.step, by_confidence=looks)
        for r, own in enumerate(most):
            if own < deepest:
                chances[r, :, own:] = 0.0
        value = net_value(chances, extra, base.rate)
        value -= np.array([net_gain(own, extra, base.rate) for own in given])[:, None]
        behind = sum(max(self._lags.get(name, 1) - 2, 0) for name in names) if self._lags else 0
        opening = self.cost.draft.at(behind) / OPENING_STEPS
        asking = best_asking(value, self.cost.draft.span(0, size), base.rate, opening)
        if asking.gain > 0.0 or self.probes.model_is_due(self.step, -asking.gain / load.decoding):
            return asking
        return NOBODY

    # ------------------------------------------------------------------ after drafting

    def admit(self, plan: Plan, drafts: Drafts) -> Batch:
        """Keep the drafts that are worth verifying; where looking is not allowed, all that were planned."""
        if self._is_on and self.cost.draft is None:
            self.heard.note(plan.rows, drafts.offers)
        self._is_plain = drafts.offers.count(NO_OFFER) == len(drafts.offers)
        if self._is_plain:
            return Batch(plan.rows)
        offered = [(i, row, offer) for i, (row, offer) in enumerate(zip(plan, drafts, strict=True)) if offer.token_ids]
        self.acceptance.note([self.beliefs.ask(row, o) for _, row, o in offered if o.source == self.sources.costly])
        chances = [self.beliefs.of(row, offer, self.step) for _, row, offer in offered]
        if self.sources.looks and self._kind != "probe":
            depths: Sequence[int] = self._worthwhile(plan, [reached(own) for own in chances])
        else:
            depths = [row.max_drafts for _, row, _ in offered]
        rows = list(plan.rows)
        for (i, row, offer), own, depth in zip(offered, chances, depths, strict=True):
            self.beliefs.admitted[row.request.request_id] = (offer, own[:depth])
            rows[i] = attach(row, offer.cut(depth))
        return Batch(tuple(rows))

    def _worthwhile(self, plan: Plan, ladders: Sequence[Sequence[float]]) -> Sequence[int]:
        """Drafts of each offer that pay for their verification; what drafting took is spent already."""
        load = Load.of(plan.rows)
        verify, spent = self.cost.judging(load, sum(map(len, ladders)))
        spent += self.cost.passes(pass_sizes(plan.rows, self._asked, self._lags)) + self.cost.overhead
        return worthwhile(load.decoding, ladders, verify, spent)

    # ------------------------------------------------------------------ afterwards

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """Learn what the step cost and which drafts were right."""
        totals = self.totals
        totals.num_steps += 1
        is_plain = self._is_plain or not any(row.draft_token_ids for row in batch)
        totals.num_zero_steps += is_plain
        if self._kind in ("zero", "prompts") and is_plain and self.trace is None and totals.num_steps % LEARN_EVERY:
            return
        if not is_plain:
            self._learn_acceptance(batch, verdict)
        load = Load.of(batch.rows)
        if is_plain:
            self.probes.saw_plain(self.step, load.decoding)
        passes = pass_sizes(batch.rows, self._asked, self._lags) if self.cost.draft is not None else []
        is_on = self._is_on
        if is_on or self._rests:
            self.cost.hear_host(seconds, is_on=is_on, has_passes=bool(passes))
        if self._kind != "prompts":
            self.cost.hear_rest(seconds.rest, is_on=is_on)
        is_rare = is_plain and self._kind == "plain probe"
        is_settled = self.cost.verify.num_observed > SETTLED and not is_rare
        if self.trace is None and is_settled and totals.num_steps % SETTLED_EVERY:
            return
        predicted = self.cost.observe(batch.num_tokens, load, passes, seconds)
        totals.time(predicted, seconds.draft + seconds.verify)
        if self.trace is not None:
            self.trace.write(self._record(batch, verdict, load, predicted, seconds))

    def _learn_acceptance(self, batch: Batch, verdict: Verdict) -> None:
        self.totals.lengths.update(len(row.draft_token_ids) for row in batch if row.max_drafts)
        outcomes = self.beliefs.outcomes(batch, verdict)
        self.acceptance.learn(outcomes, self.step)
        if self._kind == "probe" and outcomes:
            self.probes.found(sum(outcome.accepted for outcome in outcomes))

    def _record(self, batch: Batch, verdict: Verdict, load: Load, predicted: float, seconds: StepSeconds) -> StepRecord:
        rate = self._shape.rate if self._shape is not None else self._plain_rate
        return StepRecord(
            self.step, self._kind, load.decoding, load.prompts, load.keys, batch.num_tokens, predicted,
            seconds.draft, seconds.verify, rate, self._plain_rate, row_records(batch, verdict, self.beliefs.admitted),
        )  # fmt: skip

    def _prune(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        if self.acceptance.num_requests > 2 * len(running) + 64:
            kept = {r.request_id for r in running} | {r.request_id for r in waiting}
            self.acceptance.keep(kept)
            self.heard.keep(kept)
            self.beliefs.keep(kept)
