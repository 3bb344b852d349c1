"""Profile: where the time of a decoding step goes, and how far it is from what this machine could do.

    python -m evals.profile --rows 1,8,32 --quantization none,int4,int4-a8
    python -m evals.profile --rows 1,8,32 --attention
    python -m evals.profile --compile auto,max --quantization none --random gemma3_text

Every row decodes plainly behind a context of the same length. Stages of the engine are timed in served steps, those
inside the native forward by the forward itself. The limits are measured in the same run: bytes of weights over the
read bandwidth, or products over the rate of torch's own matrix product, whichever takes longer. Where the machine is
shared, medians of a step say more than their distance from a limit. With --attention it is attention alone, for many
lengths and queries, beside the time to read its keys and values.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from evals import attention_profile, results
from evals.flags import numbers, whole, words
from evals.stages import STAGES, WatchedEngine
from evals.table import render
from specdec import LLM, SamplingParams
from specdec.kernels import native
from specdec.kernels.llama_forward import STAGES as FORWARD_STAGES
from specdec.kernels.llama_forward import LlamaStep, llama_forward
from specdec.models.forward_batch import ForwardBatch, Segment
from specdec.models.quantized import weights_held

WARM_UP_STEPS = 3
HEADERS = (
    "weights", "compile", "rows", "step ms", "cpu ms", *FORWARD_STAGES, "rest of forward", "plan", "pack", "sample",
    "commit", "limit ms", "by", "linears+head / limit",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine does with all threads, measured.

    bytes_per_second      read from memory
    products_per_second   multiply-adds in float32
    narrow_products       multiply-adds of bfloat16
    byte_products         multiply-adds of bytes
    """

    num_threads: int
    bytes_per_second: float
    products_per_second: float
    narrow_products: float
    byte_products: float

    def rate(self, *, in_bytes: bool, is_narrow: bool) -> float:
        """Multiply-adds of a layer's kind of numbers: as fast as floats at least, whatever torch makes of them."""
        of_kind = self.byte_products if in_bytes else self.narrow_products if is_narrow else 0.0
        return max(of_kind, self.products_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Median milliseconds of one case.

    cpu       of a step, processor time of all threads, which a busy machine disturbs least
    forward   of each stage inside the native forward; empty where transformers' own runs
    engine    of each stage of the engine
    memory    the least time to read the weights once; arithmetic: the least time to multiply them
    """

    quantization: str
    compile: str
    rows: int
    step: float
    cpu: float
    engine: dict[str, float]
    forward: dict[str, float]
    memory: float
    arithmetic: float

    @property
    def limit(self) -> float:
        """The least the linear layers can take, in milliseconds."""
        return max(self.memory, self.arithmetic)


def best_rate(amount: float, work: Callable[[], object], times: int = 8, patience: float = 2.0) -> float:
    """Amount per second of the fastest of several runs: others on the machine only slow it down.

    patience   seconds after which no other run begins: torch multiplies bytes by the minute where it has no kernel
    """
    spent: list[float] = []
    while len(spent) < times and sum(spent) < patience:
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return amount / min(spent)


def look_at_machine() -> Machine:
    """Measure the limits: a sum over 256 MB, and products of 1024 x 1024 matrices."""
    many = torch.from_numpy(np.ones(2**25, np.int64))  # in large pages, as weights and caches are: numpy asks for them
    a = torch.randn(1024, 1024)
    narrow = a.to(torch.bfloat16)
    b = torch.randint(-100, 100, (1024, 1024), dtype=torch.int8)
    return Machine(
        num_threads=torch.get_num_threads(),
        bytes_per_second=best_rate(many.nbytes, many.sum),
        products_per_second=best_rate(1024.0**3, lambda: a @ a),
        narrow_products=best_rate(1024.0**3, lambda: narrow @ narrow),
        byte_products=best_rate(1024.0**3, lambda: torch._int_mm(b, b)),
    )


def random_model(family: str, folder: Path) -> str:
    """Write a model of a family of transformers with random weights, 8 layers and 1024 wide; return its directory."""
    config = AutoConfig.for_model(
        family, vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def measure(args: argparse.Namespace, machine: Machine, quantization: str) -> list[Profile]:
    """Every number of rows with one engine a way of compiling; the ways take turns, for a machine has moods."""
    most = max(args.rows)
    blocks = most * (args.context + 4 * args.steps) // 16 + 2 * most
    engines = {
        compile: LLM(
            args.target, None, dtype=args.dtype, quantization=quantization, compile=compile, max_num_seqs=most,
            max_num_batched_tokens=max(512, most), num_kv_blocks=blocks, enable_prefix_caching=False,
        )
        for compile in args.compile
    }  # fmt: skip
    return [
        _measure_rows(made, args, machine, (quantization, compile), rows)
        for rows in args.rows
        for compile, made in engines.items()
    ]


def _measure_rows(made: LLM, args: argparse.Namespace, machine: Machine, case: tuple[str, str], rows: int) -> Profile:
    quantization, compile = case
    model = made.engine.target.model
    steps, stages, batch = _serve(made, rows, args.context, args.steps)
    held = weights_held(model.module, model.fast)
    read = sum(num_bytes for kind, num_bytes in held.items() if kind != "rotary tables")
    is_narrow = quantization == "none" and model.dtype == torch.bfloat16 and native.has_tiles()
    rate = machine.rate(in_bytes=quantization.endswith("a8"), is_narrow=is_narrow)
    return Profile(
        quantization=quantization,
        compile=compile,
        rows=rows,
        step=1e3 * statistics.median(wall for wall, _ in steps),
        cpu=1e3 * statistics.median(cpu for _, cpu in steps),
        engine={stage: 1e3 * statistics.median(s[stage] for s in stages) for stage in STAGES},
        forward=_inside_forward(made, batch, args.steps),
        memory=1e3 * read / machine.bytes_per_second,
        arithmetic=1e3 * rows * _num_products(made) / rate,
    )


def _serve(
    made: LLM, rows: int, context: int, num_steps: int
) -> tuple[list[tuple[float, float]], list[dict[str, float]], ForwardBatch]:
    """Let every row decode: seconds and processor time of every step, seconds of its stages, and the last batch."""
    runner = made.engine.target
    pack, batches = runner.pack, []

    def remember(segments: Sequence[Segment]) -> ForwardBatch:
        batches[:] = [pack(segments)]
        return batches[0]

    with mock.patch.object(runner, "pack", remember):
        engine = WatchedEngine(made.engine)
    params = SamplingParams(temperature=0, max_tokens=num_steps + WARM_UP_STEPS + rows, ignore_eos=True)
    requests = [
        engine.make_request(f"row-{r}", [(31 * r + 7 * i) % 200 + 1 for i in range(context)], params)
        for r in range(rows)
    ]
    for request in requests:
        engine.add(request)
    while any(request.num_output_tokens < WARM_UP_STEPS for request in requests):
        engine.step()
    steps, stages = [], []
    for _ in range(num_steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        engine.step()
        steps.append((time.perf_counter() - began, time.process_time() - cpu_began))
        stages.append(dict(engine.clock.step))
    for request in requests:
        engine.abort(request.request_id)
    return steps, stages, batches[0]


def _num_products(made: LLM) -> int:
    """Multiply-adds of the linear layers for one token, from the shapes of the (possibly empty) modules."""
    module = made.engine.target.model.module
    linears = [m for m in module.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")]
    return sum(int(m.in_features) * int(m.out_features) for m in linears)  # type: ignore[arg-type]


def _inside_forward(made: LLM, batch: ForwardBatch, times: int) -> dict[str, float]:
    """Run a decoding batch again; what it writes is what is there."""
    runner = made.engine.target
    fast = runner.model.fast
    if fast is None:
        return {}
    names = ("token_ids", "positions", "slot_mapping", "block_tables", "seq_lens", "cu_query_lens", "logits_indices")
    step = LlamaStep(**{name: getattr(batch, name) for name in names})
    caches = list(zip(runner.cache.keys, runner.cache.values, strict=True))
    seen = []
    for _ in range(times):
        seconds = torch.zeros(len(FORWARD_STAGES), dtype=torch.float64)
        llama_forward(fast, step, caches, seconds)
        seen.append(seconds)
    medians = torch.stack(seen).median(0).values
    return {stage: 1e3 * float(value) for stage, value in zip(FORWARD_STAGES, medians, strict=True)}


def row_of(profile: Profile) -> list[str]:
    """One line of the table."""
    engine, inside = profile.engine, profile.forward
    by = "memory" if profile.memory >= profile.arithmetic else "arithmetic"
    linears = inside["linears"] + inside["head"] if inside else engine["forward"]
    return [
        profile.quantization, profile.compile, str(profile.rows), f"{profile.step:.1f}", f"{profile.cpu:.1f}",
        *(f"{inside[stage]:.2f}" if inside else "-" for stage in FORWARD_STAGES),
        f"{max(engine['forward'] - sum(inside.values()), 0):.2f}",
        *(f"{engine[stage]:.2f}" for stage in ("schedule", "pack", "verify", "commit")),
        f"{profile.limit:.1f}", by, f"{linears / profile.limit:.1f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    path = args.out or results.default_path("evals.profile")
    file = results.ResultFile(path, results.describe("evals.profile", argv, 0))
    scratch = tempfile.TemporaryDirectory()
    if args.random is not None:
        args.target = random_model(args.random, Path(scratch.name))
    machine = look_at_machine()
    file.write("profile.machine", asdict(machine))
    if args.attention:
        return _profile_attention(args, machine, file)
    lines = []
    for quantization in tqdm(args.quantization, unit="engine", disable=None):
        for profile in measure(args, machine, quantization):
            file.write("profile.case", {**asdict(profile), "limit": profile.limit})
            lines.append(row_of(profile))
    scratch.cleanup()
    print(render(HEADERS, lines))
    print(
        f"\nmilliseconds, medians of {args.steps} steps, context {args.context}; {machine.num_threads} threads read "
        f"{machine.bytes_per_second / 1e9:.1f} GB/s and multiply {machine.products_per_second / 1e9:.0f} G floats/s, "
        f"{machine.narrow_products / 1e9:.0f} G bfloat16/s, {machine.byte_products / 1e9:.0f} G bytes/s "
        f"(the best of 7 runs). {path}"
    )
    return 0


def _profile_attention(args: argparse.Namespace, machine: Machine, file: results.ResultFile) -> int:
    """The table of --attention."""
    most = max(args.rows)
    made = LLM(
        args.target, None, dtype=args.dtype, quantization=args.quantization[0], max_num_seqs=most,
        num_kv_blocks=most * -(-max(args.keys) // 16), enable_prefix_caching=False,
    )  # fmt: skip
    cases = attention_profile.measure_attention(
        made, machine.bytes_per_second, args.rows, args.keys, args.queries, args.steps
    )
    for case in cases:
        file.write("profile.attention", asdict(case))
    print(render(attention_profile.HEADERS, [case.row() for case in cases]))
    print(
        f"\nall layers of a step, medians of {args.steps}; {machine.num_threads} threads read "
        f"{machine.bytes_per_second / 1e9:.1f} GB/s (the best of 7 runs). {file.path}"
    )
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evals.profile", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--random", metavar="FAMILY", help="a model of random weights instead, such as gemma3_text or gpt_neox")
    add("--quantization", type=words, default=["none", "int4", "int4-a8"])
    add("--compile", type=words, default=["auto"], help="off, auto, max; in one dtype, for off's own is float32")
    add("--dtype", default="auto")
    add("--rows", type=numbers, default=[1, 8, 32])
    add("--context", type=whole(1), default=128, help="tokens of every prompt")
    add("--steps", type=whole(1), default=30)
    add("--attention", action="store_true", help="attention alone, with the first of --quantization")
    add("--keys", type=numbers, default=[128, 512, 2048], help="of a row, with --attention")
    add("--queries", type=numbers, default=[1, 4, 8], help="of a row, with --attention")
    add("--out", type=Path, help="a file of JSON lines to append to (default: under results/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
