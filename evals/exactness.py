"""Exactness: the same tokens as transformers and as plain decoding, whatever speculates; with a verdict.

    python -m evals.exactness --draft ID
    python -m evals.exactness --draft ID --random-parameters 200

It knows references, cases and the floating-point rule. It does not measure speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from evals import random_parameters, results, table, workloads
from evals.equality import Fork, Judge, is_equal
from evals.flags import whole, words
from evals.load import Job
from specdec import LLM, SamplingParams, SpeculativeConfig
from specdec.models.sources import resolve

SEED = 1234
SPAN = 50
HEADERS = ("case", "temperature", "tokens", "forks", "largest gap", "acceptance", "verdict")


@dataclass(frozen=True, slots=True)
class Case:
    """One way of running the engine.

    draft        as LLM takes it
    max_num_seqs 1: alone; 16: batched
    """

    name: str
    draft: str | None
    num_speculative_tokens: int | None
    max_num_seqs: int
    block_size: int

    def build(self, target: str, dtype: str) -> LLM:
        """The engine of this case."""
        speculative = SpeculativeConfig(num_speculative_tokens=self.num_speculative_tokens, adaptive=False)
        return LLM(
            target, self.draft, speculative=speculative, dtype=dtype, block_size=self.block_size,
            max_num_seqs=self.max_num_seqs, enable_prefix_caching=False,
        )  # fmt: skip


def cases(target: str, draft: str, stranger: str) -> list[Case]:
    """Plain, the draft, n-gram, self-draft and a draft that knows nothing; alone and together; two block sizes."""
    return [
        Case("plain, alone", None, None, 1, 16),
        Case("plain, 16 together", None, None, 16, 16),
        Case("draft k=4, 16 together", draft, 4, 16, 16),
        Case("draft k=4, alone", draft, 4, 1, 16),
        Case("ngram k=4, 16 together", "ngram", 4, 16, 16),
        Case("ngram k=8, 16 together, blocks of 64", "ngram", 8, 16, 64),
        Case("ngram k=4, alone", "ngram", 4, 1, 64),
        Case("self k=4, 16 together", target, 4, 16, 16),
        Case("random draft k=4, 16 together", stranger, 4, 16, 16),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when any output left its reference beyond rounding."""
    options = _parse(argv)
    provenance = results.describe("evals.exactness", argv if argv is not None else sys.argv[1:], SEED)
    file = results.ResultFile(options.out or results.default_path("evals.exactness"), provenance)
    target = str(resolve(options.target))
    with tempfile.TemporaryDirectory() as scratch:
        stranger = _stranger(target, Path(scratch))
        if options.random_parameters:
            return _random_parameters(options, target, stranger, file)
        chosen = [c for c in cases(target, options.draft, stranger) if _is_chosen(c.name, options)]
        rows = _kept(file, "exactness.case", HEADERS, _run(options, target, chosen))
    prompt = (workloads.load_file(options.prompts) if options.prompts else _named(options.workloads))[0]
    spans = self_acceptance(target, options.dtype, prompt)
    file.write("exactness.self_acceptance", {"per_50_tokens": spans})
    print(f"self-draft acceptance per {SPAN} tokens: " + " ".join(f"{rate:.3f}" for rate in spans))
    return _verdict(rows)


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    return not options.cases or name.split(",")[0] in options.cases


def _kept(file: results.ResultFile, kind: str, headers: Sequence[str], rows: Iterator[list[str]]) -> list[list[str]]:
    """Write each line as it comes, so that an interrupt keeps what is known; then print them all."""
    made = []
    for row in rows:
        made.append(row)
        file.write(kind, dict(zip(headers, row, strict=True)))
    print(table.render(headers, made))
    return made


def _verdict(rows: Sequence[list[str]]) -> int:
    failed = [r for r in rows if r[-1] != "equal"]
    print(f"{'NOT EXACT' if failed else 'EXACT'}: {len(rows) - len(failed)} of {len(rows)} cases are equal by the rule")
    return int(bool(failed))


def _random_parameters(options: argparse.Namespace, target: str, stranger: str, file: results.ResultFile) -> int:
    """Requests that each ask for something else, instead of prompts that ask for nothing."""
    plain = random_parameters.build(target, None, options.dtype, enable_prefix_caching=False)
    prompts = [list(job.token_ids) for job in _jobs(options, plain)]
    longest = max(map(len, prompts))
    work = random_parameters.prepare(plain, prompts, options.random_parameters, options.max_tokens, options.seed)
    few = 4 * -(-(longest + options.max_tokens + 9) // 4)  # four requests of sixteen, in blocks of 4
    every = random_parameters.cases(options.draft, stranger, few, every_length=options.every_length)
    chosen = [case for case in every if _is_chosen(case.name, options)]
    judge = Judge(Path(target), options.dtype)
    lines = random_parameters.run(work, plain, judge, tqdm(chosen, desc="cases"), options.dtype)
    headers = random_parameters.HEADERS
    rows = _kept(file, "exactness.random_parameters", headers, lines)
    print(f"{len(work.sets)} parameter sets in {options.dtype}; the reference is plain decoding, one request at a time")
    return _verdict(rows)


def _run(options: argparse.Namespace, target: str, chosen: list[Case]) -> Iterator[list[str]]:
    judge = Judge(Path(target), options.dtype)
    plain: dict[float, list[list[int]]] = {}
    for case in tqdm(chosen, desc="cases"):
        engine = case.build(target, options.dtype)
        jobs = _jobs(options, engine)
        for temperature in (0.0, options.temperature):
            own = [Job(j.prompt, j.token_ids, j.max_tokens, temperature, j.seed) for j in jobs]
            outputs, rate = _generate(engine, own)
            if temperature not in plain:
                plain[temperature] = _transformers(target, own) if temperature == 0.0 else outputs
            forks = judge.forks(own, plain[temperature], outputs)
            yield _row(case, temperature, outputs, forks, rate, options.dtype)


def _row(
    case: Case, temperature: float, outputs: list[list[int]], forks: list[Fork], rate: float, dtype: str
) -> list[str]:
    count = sum(map(len, outputs))
    gaps = [fork.gap for fork in forks if fork.gap is not None]
    verdict = "equal" if is_equal(forks, count, dtype) else "DIFFERENT"
    return [
        case.name, f"{temperature:g}", str(count), str(len(forks)), f"{max(gaps):.1e}" if gaps else "-",
        f"{rate:.3f}", verdict,
    ]  # fmt: skip


def _generate(engine: LLM, jobs: Sequence[Job]) -> tuple[list[list[int]], float]:
    params = [SamplingParams(temperature=j.temperature, seed=j.seed, max_tokens=j.max_tokens) for j in jobs]
    outputs = engine.generate([list(j.token_ids) for j in jobs], params, progress=False)
    drafted = sum(o.stats.num_draft_tokens for o in outputs)
    rate = sum(o.stats.num_accepted_tokens for o in outputs) / drafted if drafted else 0.0
    return [o.outputs[0].token_ids for o in outputs], rate


def _jobs(options: argparse.Namespace, engine: LLM) -> list[Job]:
    prompts = workloads.load_file(options.prompts) if options.prompts else _named(options.workloads)
    step = max(len(prompts) // options.num_prompts, 1)
    assert engine.tokenizer is not None
    made = []
    for index, prompt in enumerate(prompts[::step][: options.num_prompts]):
        if prompt.is_raw:
            ids = engine.tokenizer.encode(prompt.text)
        else:
            ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        made.append(Job(prompt, tuple(ids), options.max_tokens, 0.0, SEED + index))
    return made


def _named(names: str) -> list[workloads.Prompt]:
    return [prompt for name in words(names) for prompt in workloads.load_named(name)]


@torch.inference_mode()
def _transformers(target: str, jobs: Sequence[Job]) -> list[list[int]]:
    """Greedy ids of transformers.generate in fp32, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    out = []
    for job in tqdm(jobs, desc="transformers.generate", leave=False):
        ids = model.generate(torch.tensor([job.token_ids]), do_sample=False, max_new_tokens=job.max_tokens)
        out.append(ids[0, len(job.token_ids) :].tolist())
    return out


def self_acceptance(target: str, dtype: str, prompt: workloads.Prompt, num_tokens: int = 400) -> list[float]:
    """Acceptance of the target as its own draft, k = 4, for every 50 tokens of one long greedy output."""
    engine = Case("self", target, 4, 1, 16).build(target, dtype)
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = engine.engine.make_request("self", ids, params)
    engine.engine.add(request)
    drafted, accepted = [0] * (num_tokens // SPAN), [0] * (num_tokens // SPAN)
    while engine.engine.has_work:
        place = min(request.num_output_tokens // SPAN, len(drafted) - 1)
        for gain in engine.engine.step():
            drafted[place] += gain.num_drafted
            accepted[place] += gain.num_accepted
    return [a / d for a, d in zip(accepted, drafted, strict=True)]


def _stranger(target: str, folder: Path) -> str:
    """A tiny random model of the target's vocabulary: a draft that knows nothing."""
    config = AutoConfig.for_model(
        "llama", vocab_size=AutoConfig.from_pretrained(target).get_text_config().vocab_size, hidden_size=32,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evals.exactness", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="model to try (default: %(default)s)")
    parser.add_argument("--draft", default="auto", help="what drafts, as in LLM(draft=...) (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="precision of the engine (default: %(default)s)")
    parser.add_argument("--workloads", default="chat,code,math", help="named prompt sets (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, help="a file of prompts instead")
    parser.add_argument("--num-prompts", type=whole(1), default=8)
    parser.add_argument("--max-tokens", type=whole(1), default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled half (default: %(default)s)")
    parser.add_argument("--random-parameters", type=int, default=0, metavar="N", help="try N random parameter sets")
    parser.add_argument("--every-length", action="store_true", help="of them: each set with each draft length")
    parser.add_argument("--seed", type=int, default=0, help="of the random parameter sets (default: %(default)s)")
    parser.add_argument("--cases", type=words, default=[], help="only cases that begin so, as in 'plain,ngram k=4'")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to append to (default: under results/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
