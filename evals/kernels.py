"""The GPU kernels of the hot path: what they compile to, what they should cost, and what they do cost.

    python -m evals.kernels --compile-only     registers, spills and shared memory for sm_80, sm_90 and gfx942; no GPU
    python -m evals.kernels --model            bytes, operations, floor time and waves on four cards; no GPU
    python -m evals.kernels --run              measured beside PyTorch and, where installed, flash-attn and flashinfer

It composes; the table, the model and the measurement know their own business.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from evals import kernel_runs, kernel_table, marked, results, roofline
from evals.flags import numbers, whole, words
from evals.table import render


def main(argv: Sequence[str]) -> int:
    """Print one of the three tables; 1 where a default spills or does not compile, 2 for bad arguments."""
    args = _parse(argv)
    try:
        if args.compile_only:
            return kernel_table.print_table(args.ops, args.space, args.match, args.jobs, args.readme)
        grid = roofline.Grid(args.cards, args.shapes, args.batches, args.contexts, args.drafts)
        if args.model:
            table = render(roofline.HEADERS, [row.cells() for row in roofline.rows(args.ops, grid)])
            print(f"{table}\n\n{roofline.NOTES}")
            if args.readme is not None:
                command = f"`python -m evals.kernels {shlex.join(_without_readme(argv))}`"
                marked.rewrite(args.readme, "modelled", f"{command}\n\n{marked.folded('The table', table)}")
            return 0
        out = results.ResultFile(
            args.out or results.default_path("evals.kernels"), results.describe("evals.kernels", argv, 0)
        )
        return kernel_runs.run(args.ops, grid, out)
    except ValueError as error:
        print(f"evals.kernels: {error}", file=sys.stderr)
        return 2


def _without_readme(argv: Sequence[str]) -> list[str]:
    """The command whose table it is, wherever the table goes."""
    given = list(argv)
    place = given.index("--readme")
    return given[:place] + given[place + 2 :]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evals.kernels", description=(__doc__ or "").split("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--compile-only", action="store_true", help="compile for GPUs that need not be here")
    mode.add_argument("--model", action="store_true", help="the memory and compute limits, from shapes alone")
    mode.add_argument("--run", action="store_true", help="measure on this machine's GPU")
    parser.add_argument("--ops", type=words, default=list(roofline.OPS), help="default: all")
    parser.add_argument("--cards", type=words, default=list(roofline.CARDS), help="of --model")
    parser.add_argument("--shapes", type=words, default=list(roofline.SHAPES))
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=numbers, default=[512, 8192, 32768, 131072], help="tokens of every row")
    parser.add_argument("--drafts", type=numbers, default=[0, 4, 8], help="K of every row")
    parser.add_argument("--match", default="", help="of --compile-only: only rows whose name holds this")
    parser.add_argument("--space", action="store_true", help="of --compile-only: also what a sweep may try")
    parser.add_argument("--jobs", type=whole(1), default=1, help="processes that compile")
    parser.add_argument("--readme", type=Path, default=None, help="a README whose marked part gets the table")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines of --run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
