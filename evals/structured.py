"""Structured outputs: fifty JSON schemas, with and without speculation, checked by `jsonschema`.

    python -m evals.structured --target smollm2-135m --draft ngram

It counts what a user relies on (finished outputs that parse and validate, the same text however the tokens
were found) and what forced tokens are worth in target steps. It measures no quality of the answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema

from evals import results
from evals.flags import whole
from evals.schemas import SCHEMAS, Schema
from evals.table import render
from specdec import LLM, CompletionOutput, SamplingParams, SpeculativeConfig, StructuredOutputsParams

SEED = 1234
HEADERS = ("case", "finished", "valid", "same text", "target steps", "tokens", "tokens per step")


@dataclass(frozen=True, slots=True)
class Case:
    """One way of finding the tokens; `draft` as LLM takes it."""

    name: str
    draft: str | None
    forced_tokens: bool

    def build(self, options: argparse.Namespace) -> LLM:
        """The engine of this case."""
        speculative = SpeculativeConfig(forced_tokens=self.forced_tokens, adaptive=False)
        return LLM(options.target, self.draft, speculative=speculative, dtype=options.dtype)


def cases(draft: str) -> list[Case]:
    """Plain decoding, speculation, and speculation with forced tokens."""
    return [
        Case("plain", None, False),
        Case(f"{draft}", draft, False),
        Case(f"{draft}, forced tokens", draft, True),
    ]


def generate(engine: LLM, options: argparse.Namespace) -> list[CompletionOutput]:
    """One output for every schema."""
    params = [
        SamplingParams(
            temperature=options.temperature,
            seed=SEED + i,
            max_tokens=options.max_tokens,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=options.compact),
        )
        for i, schema in enumerate(SCHEMAS.values())
    ]
    prompts = [f"A JSON example of {name}: " for name in SCHEMAS]
    return [output.outputs[0] for output in engine.generate(prompts, params, progress=False)]


def is_valid(text: str, schema: Schema) -> bool:
    """True where the text is JSON that the schema accepts."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def row(name: str, outputs: Sequence[CompletionOutput], plain: Sequence[CompletionOutput]) -> dict[str, str | int]:
    """The counts of one case."""
    finished = [(o, s) for o, s in zip(outputs, SCHEMAS.values(), strict=True) if o.finish_reason == "stop"]
    steps = sum(o.stats.num_steps for o in outputs)
    tokens = sum(len(o.token_ids) for o in outputs)
    values = (
        name,
        len(finished),
        sum(is_valid(o.text, schema) for o, schema in finished),
        sum(o.token_ids == p.token_ids for o, p in zip(outputs, plain, strict=True)),
        steps,
        tokens,
        f"{tokens / steps:.2f}",
    )
    return dict(zip(HEADERS, values, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a finished output is invalid or a text differs."""
    options = _parse(argv)
    provenance = results.describe("evals.structured", argv if argv is not None else sys.argv[1:], SEED)
    file = results.ResultFile(options.out or results.default_path("evals.structured"), provenance)
    plain: list[CompletionOutput] = []
    rows = []
    for case in cases(options.draft):
        outputs = generate(case.build(options), options)
        plain = plain or outputs
        rows.append(row(case.name, outputs, plain))
        file.write("structured.case", rows[-1])
    print(render(HEADERS, [[str(value) for value in one.values()] for one in rows]))
    bad = [r for r in rows if r["valid"] != r["finished"] or r["same text"] != len(SCHEMAS)]
    print(f"{len(SCHEMAS)} schemas: {'NOT EVERY' if bad else 'every'} finished output is valid and every text the same")
    return int(bool(bad))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evals.structured", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="model to try (default: %(default)s)")
    parser.add_argument("--draft", default="ngram", help="what proposes (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="precision of the engine (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=whole(1), default=160)
    parser.add_argument("--compact", action="store_true", help="no spaces between the parts of JSON")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to append to (default: under results/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
