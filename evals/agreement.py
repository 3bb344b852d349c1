"""Agreement: how far a quantised model is from the model it was made from, on texts the model itself wrote.

    python -m evals.agreement --quantization int4,int8,int4-a8,int8-a8

The reference is the same checkpoint in float32. It continues every prompt greedily; then each candidate scores every
position of those texts, and its choices and distributions are compared. It knows nothing of speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from evals import results, workloads
from evals.flags import whole, words
from evals.table import render
from specdec import LLM, SamplingParams
from specdec.models.forward_batch import Segment

BLOCK_SIZE = 16
HEADERS = ("candidate", "dtype", "positions", "same top-1", "same top-1 where sure", "mean KL", "95 % of KL under")
MOST_TOKENS = 2048
SURE = 0.1
"""A position is sure where the reference gives its first choice this much more probability than its second."""


@dataclass(slots=True)
class Tally:
    """What was seen at every position of every text."""

    is_same: list[Tensor]
    is_sure: list[Tensor]
    divergence: list[Tensor]

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        """Compare scores [T, V] of both."""
        p, q = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
        self.is_same.append(p.argmax(-1) == q.argmax(-1))
        top = p.exp().topk(2, -1).values
        self.is_sure.append(top[:, 0] - top[:, 1] >= SURE)
        self.divergence.append((p.exp() * (p - q)).sum(-1).clamp_min(0))

    def summary(self) -> dict[str, float]:
        """Counts, shares, and the divergence KL(reference || candidate) in nats."""
        same, sure, divergence = (torch.cat(x) for x in (self.is_same, self.is_sure, self.divergence))
        return {
            "positions": len(same),
            "top1": float(same.double().mean()),
            "top1_sure": float(same[sure].double().mean()) if sure.any() else 1.0,
            "kl_mean": float(divergence.mean()),
            "kl_p95": float(divergence.quantile(0.95)),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a candidate; 1 where one agrees less than --at-least asks."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    file = results.opened("evals.agreement", argv, args.out)
    candidates = [("none", args.dtype), *((name, args.dtype) for name in args.quantization)]
    texts, reference = _reference(args)
    rows, worst = [], 1.0
    for name, dtype in tqdm(candidates, desc="candidates", disable=None):
        tally = Tally([], [], [])
        made = _build(args.target, dtype, name, texts)
        for ids, scores in zip(texts, reference, strict=True):
            tally.add(scores, _scores(made, ids))
        found = tally.summary()
        file.write("agreement.candidate", {"quantization": name, "dtype": dtype, **found})
        rows.append(_row(name, dtype, found))
        worst = min(worst, found["top1"])
    print(render(HEADERS, rows))
    print(
        f"\nagainst float32, on {len(texts)} texts it wrote greedily; KL in nats; sure: ahead by {SURE:g}. {file.path}"
    )
    return int(worst < args.at_least)


def _row(name: str, dtype: str, found: dict[str, float]) -> list[str]:
    shares = [f"{100 * found[key]:.2f} %" for key in ("top1", "top1_sure")]
    return [name, dtype, str(found["positions"]), *shares, f"{found['kl_mean']:.2e}", f"{found['kl_p95']:.2e}"]


def _reference(args: argparse.Namespace) -> tuple[list[list[int]], list[Tensor]]:
    """Texts, prompt and continuation in ids, and the float32 scores [T, V] of each."""
    made = _build(args.target, "float32", "none", [[0] * MOST_TOKENS])
    prompts = [p for name in args.workloads for p in workloads.load_named(name)]
    chosen = prompts[:: max(len(prompts) // args.num_prompts, 1)][: args.num_prompts]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    if made.tokenizer is None or not made.tokenizer.has_chat_template:
        outputs = made.generate([p.text for p in chosen], params, progress=False)
    else:
        outputs = made.chat([[{"role": "user", "content": p.text}] for p in chosen], params, progress=False)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    return texts, [_scores(made, ids) for ids in texts]


def _build(target: str, dtype: str, quantization: str, texts: Sequence[Sequence[int]]) -> LLM:
    num_blocks = max(len(ids) for ids in texts) // BLOCK_SIZE + 2
    return LLM(target, None, dtype=dtype, quantization=quantization, num_kv_blocks=num_blocks, block_size=BLOCK_SIZE)


def _scores(made: LLM, ids: list[int]) -> Tensor:
    """[T, V], what the model says behind every token."""
    runner = made.engine.target
    return runner.forward(runner.pack([Segment(ids, 0, list(range(-(-len(ids) // BLOCK_SIZE))), len(ids))])).float()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = results.parser("evals.agreement", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--quantization", type=words, default=["int4", "int8", "int4-a8", "int8-a8"])
    add("--dtype", default="bfloat16", help="of the candidates' caches and of weights that are not codes")
    add("--workloads", type=words, default=["chat", "code", "math"])
    add("--num-prompts", type=whole(1), default=6)
    add("--max-tokens", type=whole(1), default=96)
    add("--at-least", type=float, default=0.0, help="share of equal first choices below which the command fails")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
