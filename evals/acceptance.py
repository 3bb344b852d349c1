"""Acceptance: coupled and rejection side by side, on one target and one sampled draft.

    python -m evals.acceptance --target smollm2-135m --noise 0.05

Without --draft the draft is the target with Gaussian noise on its weights, a pair whose agreement the noise
sets. The two runs share prompts, seeds and draft length; the time is of the whole run, so on a busy machine
it says little. It does not measure whether speculation pays.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evals import results, workloads
from evals.flags import whole, words
from evals.table import render
from specdec import LLM, CompletionOutput, SamplingParams, SpeculativeConfig
from specdec.models.sources import resolve

SEED = 1234
HEADERS = ("acceptance", "temperature", "accepted", "drafted", "rate", "mean acceptance length", "seconds")
RULES = ("coupled", "rejection")


def noisy(target: str, noise: float, folder: Path) -> str:
    """A checkpoint of the target whose matrices carry noise of `noise` times their own standard deviation."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return str(folder)


def prompts_of(options: argparse.Namespace) -> list[str]:
    """The same few prompts for every run."""
    found = [prompt for name in options.workloads for prompt in workloads.load_named(name)]
    step = max(len(found) // options.num_prompts, 1)
    return [prompt.text for prompt in found[::step][: options.num_prompts]]


def measure(options: argparse.Namespace, draft: str, rule: str) -> list[list[str]]:
    """One row a temperature."""
    most = options.num_speculative_tokens
    speculative = SpeculativeConfig(num_speculative_tokens=most, acceptance=rule, adaptive=False)  # type: ignore[arg-type]
    engine = LLM(options.target, draft, speculative=speculative, dtype=options.dtype)
    rows = []
    for temperature in options.temperatures:
        params = [
            SamplingParams(temperature=temperature, seed=SEED + i, max_tokens=options.max_tokens, ignore_eos=True)
            for i in range(options.num_prompts)
        ]
        began = time.perf_counter()
        got = engine.generate(prompts_of(options), params, progress=False)
        seconds = time.perf_counter() - began
        rows.append(_row(rule, temperature, [o.outputs[0] for o in got], seconds))
    return rows


def _row(rule: str, temperature: float, outputs: Sequence[CompletionOutput], seconds: float) -> list[str]:
    drafted = sum(o.stats.num_draft_tokens for o in outputs)
    accepted = sum(o.stats.num_accepted_tokens for o in outputs)
    length = sum(o.stats.num_emitted for o in outputs) / sum(o.stats.num_steps for o in outputs)
    counts = (str(accepted), str(drafted), f"{accepted / drafted:.3f}", f"{length:.2f}", f"{seconds:.1f}")
    return [rule, f"{temperature:g}", *counts]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = _parse(argv)
    options.target = str(resolve(options.target))
    provenance = results.describe("evals.acceptance", argv if argv is not None else sys.argv[1:], SEED)
    file = results.ResultFile(options.out or results.default_path("evals.acceptance"), provenance)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        draft = options.draft or noisy(options.target, options.noise, Path(scratch))
        for rule in RULES:
            for row in measure(options, draft, rule):
                rows.append(row)
                file.write("acceptance.run", dict(zip(HEADERS, row, strict=True)))
    print(render(HEADERS, sorted(rows, key=lambda row: float(row[1]))))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evals.acceptance", description=__doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="model to serve (default: %(default)s)")
    add("--draft", help="a model of the same tokenizer (default: the target with noise on its weights)")
    add(
        "--noise",
        type=float,
        default=0.05,
        help="of the default draft, as a share of the weights (default: %(default)s)",
    )
    add("--dtype", default="float32", help="precision of both (default: %(default)s)")
    add("--workloads", type=words, default=["chat", "code"], help="named prompt sets (default: chat,code)")
    add("--num-prompts", type=whole(1), default=8)
    add("--max-tokens", type=whole(1), default=64)
    add("--num-speculative-tokens", type=int, default=4)
    add(
        "--temperatures", type=lambda text: [float(t) for t in words(text)], default=[0.7, 1.0], help="default: 0.7,1.0"
    )
    add("--out", type=Path, help="a file of JSON lines to append to (default: under results/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
