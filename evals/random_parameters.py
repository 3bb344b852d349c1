"""Random parameters: many requests that each ask for something else, told the same by every way of speculating.

    python -m evals.exactness --random-parameters 200

It knows ways of running the engine and what must not differ: ids, text, reason, log-probabilities, counts. The
reference is plain decoding, one request at a time. It measures no speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from evals.equality import Fork, Judge, first_difference, is_equal
from evals.parameter_sets import ParameterSet, Pool, draw, strategy
from specdec import LLM, CompletionOutput, RequestOutput, SamplingParams, SpeculativeConfig
from specdec.batch import Batch, Drafts, Plan, Verdict
from specdec.engine import derive_seed
from specdec.errors import InvalidRequestError
from specdec.kernels.accept import noise
from specdec.logprobs import TokenLogprob
from specdec.request import Request
from specdec.sampling import Choice
from specdec.sampling.sampler import process

LENGTHS = (0, 1, 4, 8)
TOGETHER = 16
MOST_LOGPROB_DIFFERENCE = 1e-3
HEADERS = (
    "case", "outputs", "tokens", "forks", "largest gap", "logprobs off by", "other differences", "acceptance",
    "verdict",
)  # fmt: skip


class Told:
    """Proposes what a request will say, told apart by its noise, or always something else."""

    max_draft_position: int | None = None

    def __init__(self, name: str, answers: dict[int, list[int]], vocab_size: int, *, is_wrong: bool) -> None:
        self.name = name
        self._answers = answers
        self._vocab_size = vocab_size
        self._shift = int(is_wrong)

    def start(self, request: Request) -> None: ...
    def stop(self, request: Request) -> None: ...
    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None: ...

    def propose(self, plan: Plan) -> Drafts:
        """The next tokens of every row's answer, all of them shifted where it shall be wrong."""
        return Drafts.of((self._offer(row.request, row.max_drafts) for row in plan), self.name)

    def _offer(self, request: Request, most: int) -> tuple[int, ...]:
        right = self._answers[request.noise_seed][request.num_output_tokens :][:most]
        return tuple((token_id + self._shift) % self._vocab_size for token_id in right)


@dataclass(frozen=True, slots=True)
class Case:
    """One way of running the engine.

    told   "right" or "wrong": the proposer is replaced by one that knows the answers
    k      None: the requests take turns in asking for 0, 1, 4 or 8 drafts
    """

    name: str
    draft: str | None
    adaptive: bool = False
    told: str = ""
    num_kv_blocks: int | None = None
    k: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Requests and what plain decoding says to each alone."""

    prompts: list[list[int]]
    sets: list[ParameterSet]
    plain: list[RequestOutput]

    def answers(self) -> dict[int, list[int]]:
        """Output ids by noise seed."""
        pairs = zip(self.sets, self.plain, strict=True)
        return {derive_seed(own["seed"], o.index): o.token_ids for own, out in pairs for o in out.outputs}


def cases(draft: str, stranger: str, few_blocks: int, *, every_length: bool) -> list[Case]:
    """Plain in batches; a good draft, a bad one, one always right and one always wrong, each fixed and adaptive."""
    kinds = (("good", draft, ""), ("bad", stranger, ""), ("right", "ngram", "right"), ("wrong", "ngram", "wrong"))
    drafting = [
        Case(f"{name}{', adaptive' if adaptive else ''}", own, adaptive, told)
        for name, own, told in kinds
        for adaptive in (False, True)
    ]
    drafting.append(Case("good, few blocks", draft, num_kv_blocks=few_blocks))
    if every_length:
        drafting = [replace(case, name=f"{case.name}, k={k}", k=k) for case in drafting for k in LENGTHS[1:]]
    return [Case("plain", None), *drafting]


def build(target: str, draft: str | None, dtype: str, *, adaptive: bool = False, **options: Any) -> LLM:
    """An engine that may draft as many tokens as any request asks for."""
    speculative = SpeculativeConfig(num_speculative_tokens=max(LENGTHS) if draft else None, adaptive=adaptive)
    return LLM(target, draft, speculative=speculative, dtype=dtype, max_num_seqs=TOGETHER, **options)


def prepare(plain: LLM, prompts: Sequence[list[int]], count: int, max_tokens: int, start: int) -> Work:
    """Draw the sets against what the model is likely to say, and decode each plainly and alone.

    plain   built without a draft and without prefix caching
    """
    pool = _pool(plain, prompts, max_tokens)
    asked = [prompts[i % len(prompts)] for i in range(count)]

    def accepts(own: ParameterSet) -> bool:
        try:
            plain.engine.make_request("asked", asked[0], SamplingParams(**own))
        except InvalidRequestError:
            return False
        return True

    sets = draw(strategy(pool, max_tokens), count, start, accepts)
    if len(sets) < count:
        raise ValueError(f"hypothesis drew {len(sets)} sets of {count} that the target accepts")
    outputs = [
        plain.generate([p], SamplingParams(**own), progress=False)[0] for p, own in zip(asked, sets, strict=True)
    ]
    return Work(asked, sets, outputs)


def _pool(plain: LLM, prompts: Sequence[list[int]], max_tokens: int) -> Pool:
    """Ids and words of what the model says to the prompts when nothing is asked for."""
    model = plain.engine.target.model
    params = SamplingParams(temperature=0.7, seed=0, max_tokens=max_tokens)
    outputs = plain.generate(list(prompts), params, progress=False)
    ids = {token_id for o in outputs for token_id in (*o.prompt_token_ids, *o.outputs[0].token_ids)}
    ids |= {*model.eos_token_ids, *range(8)}
    text = " ".join(o.outputs[0].text for o in outputs)
    whole = text.split()
    words = {"zq", *whole, *(" " + word for word in whole), *(text[i : i + 2] for i in range(0, len(text) - 2, 5))}
    return Pool(tuple(sorted(i for i in ids if i < model.vocab_size)), tuple(sorted(w for w in words if w)))


class Comparison:
    """Holds outputs against the reference; a fork is weighed by the law that its request asked for."""

    def __init__(self, plain: LLM, judge: Judge, work: Work) -> None:
        self._plain = plain
        self._judge = judge
        self._work = work

    def row(self, case: Case, outputs: Sequence[RequestOutput], dtype: str) -> list[str]:
        """One line of the table."""
        forks: list[Fork] = []
        off, others = 0.0, 0
        for index, (one, other) in enumerate(zip(self._work.plain, outputs, strict=True)):
            off = max(off, logprobs_off_by(one.prompt_logprobs, other.prompt_logprobs))
            for left, right in zip(one.outputs, other.outputs, strict=True):
                fork = self._fork(index, left, right)
                if fork is not None:
                    forks.append(fork)
                    continue
                others += _others(left) != _others(right) or right.stats.num_emitted != len(right.token_ids)
                off = max(off, logprobs_off_by(left.logprobs, right.logprobs))
        num_tokens = sum(len(o.token_ids) for out in outputs for o in out.outputs)
        drafted = sum(out.stats.num_draft_tokens for out in outputs)
        accepted = sum(out.stats.num_accepted_tokens for out in outputs)
        is_good = is_equal(forks, num_tokens, dtype) and not others and off < MOST_LOGPROB_DIFFERENCE
        gaps = [fork.gap for fork in forks if fork.gap is not None]
        return [
            case.name, str(sum(len(out.outputs) for out in outputs)), str(num_tokens), str(len(forks)),
            f"{max(gaps):.1e}" if gaps else "-", f"{off:.1e}", str(others),
            f"{accepted / drafted:.3f}" if drafted else "-", "equal" if is_good else "DIFFERENT",
        ]  # fmt: skip

    def _fork(self, index: int, left: CompletionOutput, right: CompletionOutput) -> Fork | None:
        position = first_difference(left.token_ids, right.token_ids)
        if position is None:
            return None
        if position >= min(len(left.token_ids), len(right.token_ids)):
            return Fork(index, position, None, 0.0)
        params, prompt = SamplingParams(**self._work.sets[index]), self._work.prompts[index]
        request = self._plain.engine.make_request("fork", prompt, params, index=left.index)
        request.extend(left.token_ids[:position])
        logits = self._judge.logits([*prompt, *left.token_ids[:position]])
        scores = process(logits[None].clone(), [Choice(request, position)])
        if not params.is_greedy:
            seed, place = logits.new_tensor([request.noise_seed]).long(), logits.new_tensor([position]).long()
            scores = scores + noise(seed, place, scores.shape[1], scores.dtype)
        worst = min(float(scores[0, left.token_ids[position]]), float(scores[0, right.token_ids[position]]))
        tolerance = self._judge.tolerance(float(logits.abs().max()), params.temperature)
        return Fork(index, position, float(scores.max()) - worst, tolerance)


def _others(output: CompletionOutput) -> tuple[object, ...]:
    """What else must be the same where the ids are."""
    return output.text, output.finish_reason, output.error, output.logprobs is None


def logprobs_off_by(one: Sequence[TokenLogprob | None] | None, other: Sequence[TokenLogprob | None] | None) -> float:
    """The largest difference between two reports, infinite where they do not speak of the same tokens."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if len(one) != len(other):
        return float("inf")
    return max((_off_by(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def _off_by(one: TokenLogprob | None, other: TokenLogprob | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.token_id != other.token_id or len(one.top) != len(other.top):
        return float("inf")
    # Two of the likeliest may change places where they are as near as rounding; their values tell.
    pairs = [(one.logprob, other.logprob), *((a, b) for (_, a), (_, b) in zip(one.top, other.top, strict=True))]
    return max(0.0 if a == b else float("inf") if a is None or b is None else abs(a - b) for a, b in pairs)


def generate(made: LLM, case: Case, work: Work, offset: int) -> list[RequestOutput]:
    """All requests of the work in one engine, as the case says."""
    if case.told:
        engine = made.engine
        vocab_size = engine.target.model.vocab_size
        engine.proposer = Told(engine.proposer.name, work.answers(), vocab_size, is_wrong=case.told == "wrong")
    lengths = [LENGTHS[(i + offset) % len(LENGTHS)] if case.k is None else case.k for i in range(len(work.sets))]
    params = [
        SamplingParams(**own, speculative={"num_speculative_tokens": k})
        for own, k in zip(work.sets, lengths, strict=True)
    ]
    return made.generate(work.prompts, params, progress=False)


def run(work: Work, plain: LLM, judge: Judge, chosen: Sequence[Case], dtype: str) -> Iterator[list[str]]:
    """A line of the table for each case."""
    comparison = Comparison(plain, judge, work)
    for offset, case in enumerate(chosen):
        options = {} if case.num_kv_blocks is None else {"num_kv_blocks": case.num_kv_blocks, "block_size": 4}
        made = build(str(judge.model_path), case.draft, dtype, adaptive=case.adaptive, **options)
        yield comparison.row(case, generate(made, case, work, offset), dtype)
