"""python -m draft_models.train: from prompts (and answers) to a draft an engine can load.

It knows flags and the order of the stages; each stage is a module of its own. Run it again with the same --out
and it continues; `accelerate launch -m draft_models.train …` runs it on several devices.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draft_models import answers, corpus, precision, provenance, start
from draft_models.checkpoint import load_facts
from draft_models.features import FeatureTap, Sample, describe
from draft_models.recipes import Eagle3, TinyLlama
from draft_models.supply import Supply
from draft_models.target import Target, load_target
from draft_models.training import Settings, Trainer

logger = logging.getLogger("draft_models")

WHOLE = (
    "draft_vocab_size", "num_layers", "max_length", "answer_length", "epochs", "rows", "fit_shards", "batch_rows",
    "unroll", "heldout_most",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m draft_models.train", description=__doc__)
    add = flags.add_argument
    add("--target", default="smollm2-135m", help="alias, directory, .gguf file or hub id")
    add("--data", type=Path, required=True, help="JSON lines with `prompt` and, where known, `response`")
    add("--method", choices=("eagle3", "llama"), default="eagle3")
    add("--out", type=Path, required=True, help="folder of the checkpoint and of the state that continues its training")
    add("--features", type=Path, help="folder that keeps the target's features between epochs and runs")
    add("--feature-layers", type=_ids, help="entry layers a head reads, as 2,15,30; default: 2, half, all")
    add("--stored-layers", type=_ids, help="entry layers kept in --features; default: those a head reads")
    add("--draft-vocab-size", type=int, default=8192)
    add("--from", dest="start", type=Path, help="directory of a trained head to start from, in place of a fresh one")
    add("--precision", choices=precision.CHOICES, default="auto", help="of matrix products; auto: bf16 if it is fast")
    add(
        "--features-only", action="store_true", help="fill the folder of --features, beside a run that trains, and stop"
    )
    add("--num-layers", type=int, default=2, help="layers of --method llama")
    add("--max-length", type=int, default=576, help="tokens of a prompt with its answer")
    add("--answer-length", type=int, default=256, help="tokens at which answers of the data were cut")
    add("--epochs", type=int, default=3)
    add("--rows", type=int, help="answer tokens to train on in all; default: --epochs times the data")
    add("--fit-shards", type=int, default=8, help="shards of 32 examples the start of a head is solved from")
    add("--minutes", type=float, help="stop (and save) after this long; run again to continue")
    add("--batch-rows", type=int, default=1024)
    add("--unroll", type=int, default=3, help="steps of the training-time test (1 for --method llama)")
    add("--muon-rate", type=float, default=0.004)
    add("--adam-rate", type=float, default=3e-4)
    add("--cooldown", type=float, default=0.25, help="share of the rows, the last, over which rates fall")
    add("--heldout-percent", type=float, default=1.0)
    add("--heldout-most", type=int, default=40, help="held-out examples measured while training")
    add("--every", type=float, default=240.0, help="seconds between two measures")
    add("--seed", type=int, default=0)
    return flags


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class Data:
    """Examples of a run, encoded, in the order they are trained on."""

    training: list[corpus.Example]
    heldout: list[corpus.Example]


def read_data(args: argparse.Namespace, target: Target) -> Data:
    """Read, complete, split and encode; the split and the order depend on the prompts and the seed alone."""
    records = answers.complete(
        corpus.read_records(args.data), args.target, args.out / "answers.jsonl", args.answer_length
    )
    training, heldout = corpus.split(records, args.heldout_percent)
    if not training or not heldout:
        raise ValueError(f"--heldout-percent {args.heldout_percent} leaves {len(training)} and {len(heldout)} examples")
    eos = target.tokenizer.eos_token_id

    def encode(record: dict[str, Any]) -> corpus.Example:
        return corpus.encode(record, target.tokenizer, eos, args.max_length, args.answer_length)

    return Data([encode(r) for r in corpus.shuffled(training, args.seed)], [encode(r) for r in heldout])


def layers_of(args: argparse.Namespace, target: Target) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Entry layers the head reads, and those stored: the last entry, which gives the target's law, is one."""
    num_layers = target.config.num_hidden_layers
    default = tuple(sorted({min(2, num_layers // 2), num_layers // 2, num_layers}))
    read = None if args.start is None else load_facts(args.start)
    layers = args.feature_layers or read or default
    if read and layers != read:
        raise ValueError(f"--feature-layers is {layers}, but the head in {args.start} reads {read}")
    if list(layers) != sorted(layers):
        raise ValueError(f"--feature-layers is {layers}; columns of fc stand in ascending order")
    stored = args.stored_layers or tuple(sorted({*layers, num_layers}))
    if not set(layers) <= set(stored) or stored[-1] != num_layers:
        raise ValueError(f"--stored-layers is {stored}; it must hold {layers} and end with {num_layers}")
    return layers, stored


def build_recipe(args: argparse.Namespace, target: Target, data: Data, layers: Sequence[Any]) -> Eagle3 | TinyLlama:
    """A draft of the chosen kind, fresh or as it was saved."""
    torch.manual_seed(args.seed)
    if args.method == "llama":
        if args.start is not None:
            raise ValueError("--from starts heads; --method llama always starts fresh")
        return TinyLlama.fresh(target, args.num_layers)
    if args.start is not None:
        return Eagle3.read(args.start, target, layers[1])
    eos = target.tokenizer.eos_token_id
    size = min(args.draft_vocab_size, target.embedding.shape[0])
    return Eagle3.fresh(target, corpus.frequent_ids(data.training, size, [eos]), *layers)


def _check(flags: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing, before anything is loaded."""
    if not 0.0 < args.cooldown <= 1.0:
        flags.error(f"--cooldown is {args.cooldown}; it must be above 0 and at most 1")
    for name in WHOLE:
        if (value := getattr(args, name)) is not None and value < 1:
            flags.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    for name in ("muon_rate", "adam_rate", "every"):
        if not 0.0 <= (value := getattr(args, name)) < float("inf"):
            flags.error(f"--{name.replace('_', '-')} is {value}; it must be finite and at least 0")
    if args.minutes is not None and not 0.0 < args.minutes < float("inf"):
        flags.error(f"--minutes is {args.minutes}; it must be finite and above 0")
    if not 0.0 < args.heldout_percent < 100.0:
        flags.error(f"--heldout-percent is {args.heldout_percent}; it must be above 0 and below 100")
    if args.features_only and args.features is None:
        flags.error("--features-only fills the folder of --features DIR, which is not given")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    flags = parser()
    args = flags.parse_args(argv)
    _check(flags, args)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    device = Accelerator().device
    dtype = precision.choose(args.precision, device)
    target = load_target(args.target, device, dtype)
    try:
        data = read_data(args, target)
    except (OSError, ValueError) as error:
        flags.error(str(error))
    layers, stored = layers_of(args, target)
    tap = FeatureTap(target.model, stored)
    if args.features is not None:
        describe(
            args.features, stored, data=corpus.file_hash(args.data), seed=args.seed, max_tokens=args.max_length,
            dtype=str(dtype).removeprefix("torch."),
        )  # fmt: skip
    heldout = _heldout(args, data, tap)
    recipe = build_recipe(args, target, data, (layers, stored)).to(device)
    supply = Supply(data.training, tap, args.epochs, args.features)
    if args.features_only:
        supply.fill()
        return
    settings = replace(_settings(args, data), dtype=dtype)
    if isinstance(recipe, Eagle3):
        settings = replace(settings, fc_scale=1.0 / _begin(args, recipe, target, supply))
    trainer = Trainer(recipe, supply, heldout, settings, args.out)
    logger.info("%d examples, %d held out; %d rows to go through", len(data.training), len(data.heldout), settings.rows)
    _say_origin(args, target.base, trainer)  # a run that is killed leaves its origin too
    try:
        trainer.run(None if args.minutes is None else began + 60 * args.minutes)
    finally:
        _say_origin(args, target.base, trainer)


def _say_origin(args: argparse.Namespace, target_sha256: str, trainer: Trainer) -> None:
    """Write where the draft comes from, as far as it has come."""
    if trainer.accelerator.is_main_process:
        provenance.record(
            args.out, arguments=vars(args), data_sha256=corpus.file_hash(args.data), target_sha256=target_sha256,
            rows=trainer.progress.rows, distinct_shards=len(trainer.supply.visits),
            started_from=None if args.start is None else provenance.origin(args.start),
            products_in=str(trainer.settings.dtype).removeprefix("torch."),
            hours=round(trainer.progress.seconds / 3600, 3),
        )  # fmt: skip


def _heldout(args: argparse.Namespace, data: Data, tap: FeatureTap) -> list[Sample]:
    """Held-out samples; kept where features are."""
    folder = None if args.features is None else args.features / f"heldout-{args.heldout_percent:g}-{args.heldout_most}"
    most = args.heldout_most
    return Supply(data.heldout[:most], tap, 1, folder, shard_size=most).samples(0)


def _begin(args: argparse.Namespace, recipe: Eagle3, target: Target, supply: Supply) -> float:
    """Solve the start of a fresh head; the size of its features either way."""
    is_trained = args.start is not None or (args.out / "state.pt").exists()
    shards = range(1 if is_trained else min(args.fit_shards, supply.num_shards))
    samples = [sample for shard in shards for sample in supply.samples(shard)]
    if is_trained:
        return start.feature_size(samples, recipe.picks, recipe.head.config.hidden_size)
    return start.fit(recipe.head, target, samples, recipe.picks)


def _settings(args: argparse.Namespace, data: Data) -> Settings:
    whole = sum(max(0, len(e.ids) - 1 - e.answer_start) for e in data.training)
    return Settings(
        rows=args.rows or args.epochs * whole,
        batch_rows=args.batch_rows,
        unroll=1 if args.method == "llama" else args.unroll,
        muon_rate=args.muon_rate,
        adam_rate=args.adam_rate,
        cooldown=args.cooldown,
        every_seconds=args.every,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
