"""The engine: one step, read aloud, and the door through which requests come in.

It composes scheduler, proposer, controller, target and verification; each of them does its own work.
It knows no text, no HTTP and no threads.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from specdec.batch import Plan, StepSeconds
from specdec.controller import Controller
from specdec.errors import ContextLengthError, EngineDeadError, InvalidRequestError, shown
from specdec.models.forward_batch import Segment
from specdec.models.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.request import Request, StopMatcher
from specdec.sampling import verify
from specdec.sampling.grammar import GrammarCompiler
from specdec.sampling.guide import Guide
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Emitted, Scheduler
from specdec.vocabulary import resolve

logger = logging.getLogger("specdec")

MAX_FAULTS_IN_A_ROW = 2
_MASK64 = 2**64 - 1


def derive_seed(seed: int, index: int) -> int:
    """The noise seed of choice `index` of a request: its own seed first, then well-mixed others.

    (The mixer is SplitMix64: Steele, Lea, Flood 2014.)
    """
    if index == 0:
        mixed = seed & _MASK64
    else:
        mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def link_choices(requests: Sequence[Request]) -> None:
    """Let the n choices of one prompt share its blocks: the first computes it, the others wait for that."""
    for request in requests[1:]:
        request.leader = requests[0]


class Engine:
    """Continuous batching with speculation over one shared paged cache.

    around_step   what every step runs inside of
    """

    def __init__(
        self,
        target: ModelRunner,
        proposer: Proposer,
        controller: Controller,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.controller = controller
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.num_steps = 0
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        model = target.model
        self.guide = Guide()
        self.grammars = GrammarCompiler(getattr(model, "tokenizer", None), model.vocab_size, model.eos_token_ids)
        self._seeds = random.Random(seed)
        self._faults_in_a_row = 0
        self._host = 0.0  # seconds of the controller's verbs that the next step is told of
        self._last: float | None = None  # when the verdict before was worked in; None: nothing was left to do

    # ------------------------------------------------------------------ the door

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        base_seed: int | None = None,
        stop_matcher: StopMatcher | None = None,
    ) -> Request:
        """Check a request against model and cache; nothing is queued yet.

        index       which of the n choices this is
        base_seed   shared by the n choices of an unseeded request
        """
        prompt = self.checked_prompt(prompt_token_ids)
        seed = params.seed if params.seed is not None else base_seed
        model = self.target.model
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= model.eos_token_ids
        request = Request(
            request_id,
            prompt,
            params,
            noise_seed=derive_seed(self.fresh_seed() if seed is None else seed, index),
            max_output_tokens=self._max_output_tokens(len(prompt), params.max_tokens),
            stop_token_ids=stop_ids,
            stop_matcher=stop_matcher,
        )
        request.rules = resolve(params, request.rules, model.vocab_size, getattr(model, "tokenizer", None))
        if params.structured_outputs is not None:
            request.grammar = self.grammars.matcher(params.structured_outputs_params, ignore_eos=params.ignore_eos)
        if request.max_output_tokens < request.rules.min_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}; behind this prompt there is room for "
                f"{request.max_output_tokens} tokens",
                param="min_tokens",
            )
        return request

    def fresh_seed(self) -> int:
        """A seed nobody had before in this engine."""
        return self._seeds.getrandbits(63)

    def checked_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt as a list; whatever is not a list of ids of this target is refused by name."""
        vocab_size = self.target.model.vocab_size
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidRequestError(f"prompt is {type(token_ids).__name__}; token ids must be a list", param="prompt")
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"prompt holds {shown(token_id)}; token ids must be integers from 0 to {vocab_size - 1}",
                    param="prompt",
                )
        if not token_ids:
            raise InvalidRequestError("prompt is empty; it must hold at least one token", param="prompt")
        return list(token_ids)

    def _max_output_tokens(self, num_prompt: int, max_tokens: int | None) -> int:
        """Resolve max_tokens; refuse what can never fit, with the numbers.

        The last token emitted is never cached, so one more token than the pool holds can be known.
        """
        room = self.max_model_len - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"prompt has {num_prompt} tokens; the model length is {self.max_model_len} tokens for prompt and "
                f"output together, so at most {self.max_model_len - 1} fit",
                param="prompt",
            )
        pool = self.scheduler.pool
        capacity = pool.num_blocks * pool.block_size
        in_pool = capacity + 1 - num_prompt
        wanted = min(room, max_tokens if max_tokens is not None else room)
        if in_pool < (wanted if max_tokens is not None else 1):
            raise ContextLengthError(
                f"prompt has {num_prompt} tokens and max_tokens is {max_tokens}; the cache holds {capacity} tokens "
                f"({pool.num_blocks} blocks of {pool.block_size}), so this request can never fit",
                param="max_tokens" if in_pool >= 1 else "prompt",
            )
        return min(wanted, in_pool)

    def add(self, request: Request) -> None:
        """Queue a request for the next step."""
        if self.is_dead:
            raise EngineDeadError("the engine failed twice in a row and takes no more requests")
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request between steps and free what it holds."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.proposer.stop(request)
        return request

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return self.scheduler.has_work

    @property
    def is_dead(self) -> bool:
        """True after two faults in a row."""
        return self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW

    # ------------------------------------------------------------------ the step

    def step(self) -> list[Emitted]:
        """Plan, draft, verify, commit; return what each row gained."""
        began = perf_counter()
        self.controller.prepare(self.scheduler.running, self.scheduler.waiting)
        self._host += perf_counter() - began
        plan = self.scheduler.schedule(self._budget)
        self._tell_proposer(plan)
        if not plan.rows:
            return []
        try:
            with self.around_step():
                emitted = self._run(plan)
        except Exception as error:
            emitted = self._fail(plan, error)
        else:
            self._faults_in_a_row = 0
        self.num_steps += 1
        for gain in emitted:
            if gain.request.is_finished:
                self.proposer.stop(gain.request)
        return emitted

    def _run(self, plan: Plan) -> list[Emitted]:
        started = perf_counter()
        rest = 0.0 if self._last is None else started - self._last - self._host
        self._last = None  # a step that fails is followed by none of this
        drafts = self.guide.admit(plan, self.proposer.propose(self.guide.to_ask(plan)))
        drafted = perf_counter()
        batch = self.controller.admit(plan, drafts)
        admitted = perf_counter()
        segments = [Segment(r.query_token_ids, r.start, r.request.block_table, r.num_logits) for r in batch]
        logits = self.target.forward(self.target.pack(segments))
        verdict = verify(batch, logits, drafts)
        judged = perf_counter()
        self.proposer.observe(batch, verdict, self.target.features)
        followed = perf_counter()
        host = self._host + admitted - drafted
        self.controller.observe(
            batch, verdict, StepSeconds(drafted - started, judged - admitted, host, followed - judged, max(rest, 0.0))
        )
        self._host = perf_counter() - followed
        emitted = self.scheduler.commit(batch, verdict)
        is_calm = all(row.num_base == 1 for row in batch)  # prompts take time of their own between steps
        self._last = followed if is_calm and self.scheduler.has_work else None
        return emitted

    def _budget(self, request: Request) -> int:
        """Most drafts of a request: the controller's word, or what its grammar forces where it may speculate."""
        most = self.controller.budget(request)
        return most if self.proposer.max_draft_position == 0 else self.guide.budget(request, most)

    def _tell_proposer(self, plan: Plan) -> None:
        for request in plan.left:
            self.proposer.stop(request)
        for request in plan.joined:
            self.proposer.start(request)

    def _fail(self, plan: Plan, error: Exception) -> list[Emitted]:
        """A fault that cannot be pinned on a row fails the rows of this step, not those that wait."""
        logger.exception("a step of %d rows failed", len(plan))
        self._faults_in_a_row += 1
        rows = [row.request for row in plan if not row.request.is_finished]
        self.scheduler.fail_all(rows, f"the step failed: {type(error).__name__}: {error}")
        return [Emitted(request, (), 0, 0) for request in rows]
