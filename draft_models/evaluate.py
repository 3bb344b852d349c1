"""python -m draft_models.evaluate DIR: what a draft is worth on texts of its target.

Answers are the target's own (made by our engine and kept with --answers); the draft is asked at every place of
them, which gives what an engine would accept. It knows flags and tables; the measures are modules of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draft_models import answers, corpus, cost
from draft_models.acceptance import Shared, Tally, run_lengths, walk, walk_beside
from draft_models.checkpoint import load_facts
from draft_models.features import FeatureTap, Sample, describe
from draft_models.measure import agreements
from draft_models.offers import ngram_runs
from draft_models.recipes import Eagle3, TinyLlama
from draft_models.supply import Supply
from draft_models.target import Target, load_target


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m draft_models.evaluate", description=__doc__)
    add = flags.add_argument
    add("draft", type=Path, help="directory of the draft")
    add("--target", default="smollm2-135m")
    add("--data", type=Path, required=True, help="JSON lines with `prompt` or `turns`, and `category`")
    add("--answers", type=Path, required=True, help="folder that keeps answers and features")
    add("--per-category", type=int, default=5, help="prompts of each category")
    add("--max-tokens", type=int, default=160)
    add("--max-length", type=int, default=2048)
    add("--k", type=int, default=5)
    add("--temperatures", type=float, nargs="+", default=(0.0, 1.0), choices=(0.0, 1.0))
    add("--ks", type=int, nargs="*", default=(1, 2, 3, 5), help="draft lengths timed in the engine; none: no timing")
    add("--json", type=Path, help="also write the figures here")
    add("--seed", type=int, default=0, help="of the noise at temperature 1")
    return flags


@dataclass(frozen=True, slots=True)
class Texts:
    """Answers of one temperature: samples with features, their categories beside them."""

    samples: list[Sample]
    categories: list[str]


def read_draft(folder: Path, target: Target) -> tuple[Eagle3 | TinyLlama, tuple[int, ...]]:
    """The draft and the entry layers it must be given; the last entry always is one."""
    last = target.config.num_hidden_layers
    layers = load_facts(folder)
    if layers is None:
        return TinyLlama.read(folder, target), (last,)
    stored = tuple(sorted({*layers, last}))
    return Eagle3.read(folder, target, stored), stored


def read_texts(args: argparse.Namespace, target: Target, tap: FeatureTap, temperature: float) -> Texts:
    """The first prompts of each category with the target's answers at a temperature."""
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in corpus.read_records(args.data):
        by_category[str(record.get("category", "all"))].append(record)
    records = [record for group in by_category.values() for record in group[: args.per_category]]
    path = args.answers / f"temperature-{temperature:g}.jsonl"
    answered = answers.complete(records, args.target, path, args.max_tokens, (temperature,))
    eos = target.tokenizer.eos_token_id
    examples = [corpus.encode(r, target.tokenizer, eos, args.max_length, args.max_tokens) for r in answered]
    by_ids = {(e.ids, e.answer_start): e.category for e in examples}
    folder = args.answers / f"features-{temperature:g}-{'-'.join(map(str, tap.layers))}"
    digest = hashlib.sha256(json.dumps([e.ids for e in examples]).encode()).hexdigest()
    describe(folder, tap.layers, examples=digest, target=target.base)
    samples = Supply(examples, tap, 1, folder, shard_size=len(examples)).samples(0)
    return Texts(samples, [by_ids[tuple(s.ids.tolist()), s.answer_start] for s in samples])


def figures(tables: Sequence[torch.Tensor], offers: Sequence[torch.Tensor], k: int) -> dict[str, Any]:
    """The figures of some texts: the draft alone, and beside n-gram lookup."""
    runs = [run_lengths(table).tolist() for table in tables]
    alone = Tally.total(walk(r, k) for r in runs)
    shared = [walk_beside(r, o.tolist(), k) for r, o in zip(runs, offers, strict=True)]
    total = {name: Tally.total(getattr(s, name) for s in shared) for name in Shared.__dataclass_fields__}
    return {
        "places": sum(map(len, runs)),
        "mean_acceptance_length": alone.mean_length,
        "conditional": alone.conditional(),
        "length_by_k": {j: Tally.total(walk(r, j) for r in runs).mean_length for j in range(1, k + 1)},
        "ngram": total["alone"].mean_length,
        "hybrid": total["hybrid"].mean_length,
        "without_offer": total["without"].mean_length,
        "share_without_offer": total["without"].steps / max(1, total["hybrid"].steps),
    }


def acceptance(recipe: Any, texts: Texts, k: int, noise_seed: int | None) -> dict[str, dict[str, Any]]:
    """Figures of all texts and of every category."""
    tables = agreements(recipe, texts.samples, k, noise_seed)
    offers = [ngram_runs(sample, k) for sample in texts.samples]
    found = {"all": figures(tables, offers, k)}
    for name in sorted(set(texts.categories)):
        mine = [i for i, category in enumerate(texts.categories) if category == name]
        found[name] = figures([tables[i] for i in mine], [offers[i] for i in mine], k)
    return found


def show(temperature: float, found: dict[str, dict[str, Any]], k: int) -> str:
    """A Markdown table of one temperature."""
    columns = (
        "category", "places", "draft", "by position, given those before", "n-gram", "both",
        "draft where no n-gram offer", "share of such steps",
    )  # fmt: skip
    head = f"Temperature {temperature:g}, k = {k}: mean acceptance length (with the recovered or bonus token)\n\n"
    head += "| " + " | ".join(columns) + " |\n"
    rows = ["|---|---|---|---|---|---|---|---|"]
    for name, f in found.items():
        positions = " ".join("-" if c != c else f"{c:.2f}" for c in f["conditional"])
        rows.append(
            f"| {name} | {f['places']} | {f['mean_acceptance_length']:.2f} | {positions} | {f['ngram']:.2f} | "
            f"{f['hybrid']:.2f} | {f['without_offer']:.2f} | {100 * f['share_without_offer']:.0f} % |"
        )
    return head + "\n".join(rows) + "\n"


def timings(args: argparse.Namespace, texts: Texts, lengths: dict[int, float]) -> dict[str, Any]:
    """Step and draft times in the engine at concurrency 1, and the k that pays most by them."""
    prompts = [s.ids[: s.answer_start].tolist() for s in texts.samples[:: max(1, len(texts.samples) // 4)]]
    costs = cost.measure(args.target, args.draft, prompts, args.ks)
    k, ratio = cost.best_k(costs, lengths)
    plain = costs[0].step
    print("| k | step, ms | of it drafting, ms | a draft token, % of a plain step | emitted tokens a second |")
    print("|---|---|---|---|---|")
    for c in costs:
        share = f"{100 * c.propose / c.k / plain:.1f}" if c.k else "-"
        rate = (lengths[c.k] if c.k else 1.0) / c.step
        print(f"| {c.k} | {1e3 * c.step:.2f} | {1e3 * c.propose:.2f} | {share} | {rate:.1f} |")
    print(f"\nBest k by acceptance and these times: {k}, {ratio:.2f} times plain decoding.")
    return {"steps": [[c.k, c.step, c.propose] for c in costs], "best_k": k, "ratio": ratio}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parser().parse_args(argv)
    target = load_target(args.target)
    recipe, stored = read_draft(args.draft, target)
    tap = FeatureTap(target.model, stored)
    out: dict[str, Any] = {"draft": args.draft.name, "target": target.name}
    texts = None
    for temperature in args.temperatures:
        texts = read_texts(args, target, tap, temperature)
        found = acceptance(recipe, texts, args.k, args.seed if temperature else None)
        print(show(temperature, found, args.k), flush=True)
        out[f"temperature {temperature:g}"] = found
    if args.ks and texts is not None:
        known = out[f"temperature {args.temperatures[0]:g}"]["all"]["length_by_k"]
        out["cost"] = timings(args, texts, known)
    if args.json is not None:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
