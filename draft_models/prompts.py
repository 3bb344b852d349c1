"""Prompts: questions the target asks itself, with its answers, so that a draft sees more than the data at hand.

It knows the chat template, the engine's public face and a file of JSON lines. It does not know training.
A chat model that is given the template up to where a user's words begin goes on as that user (Magpie: Xu et al.
2024, arXiv 2406.08464); a few first words, given in turn, spread what it asks over kinds of work.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_models.answers import TEMPERATURES, read_written
from draft_models.corpus import prompt_ids
from specdec import LLM, SamplingParams

logger = logging.getLogger("draft_models")

GROUP = 64  # questions asked, then answered, between two writes
LEAST = 12  # characters of a question
OPENINGS = {
    "open": ("", "", "", "", "How", "What", "Can you", "I", "Please", "My"),
    "writing": ("Write a", "Draft an email", "Compose", "Describe", "Edit the following", "Write a short story"),
    "roleplay": ("Imagine you are", "Pretend to be", "You are a", "Act as a", "Take on the role of"),
    "reasoning": ("If", "Suppose", "Consider", "Which", "Is it"),
    "math": ("Solve", "Calculate", "A", "How many", "Find the"),
    "coding": ("Write a Python", "Implement", "Write a function", "Write a program", "Debug", "def"),
    "extraction": ("Extract", "Given the following", "Identify the", "From the text", "Analyze the following"),
    "stem": ("Explain", "What is the difference between", "Describe the process of", "How does", "Why do"),
    "humanities": ("Discuss", "Compare", "What were the causes of", "Provide insights into", "Who"),
    "translation": ("Translate", "Translate the following sentence", "Translate from German to English:"),
    "summarization": ("Summarize", "Summarize the following", "Give a summary of", "TL;DR"),
    "lookup": ("When", "Where", "Who was", "What is the name of", "Answer the question"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of the target's own: its number in the run, its kind, its text."""

    number: int
    kind: str
    prompt: str


def opening(number: int) -> tuple[str, str]:
    """Kind and first words of question `number`: kinds in turn, their openings in turn."""
    kinds = list(OPENINGS)
    kind = kinds[number % len(kinds)]
    words = OPENINGS[kind]
    return kind, words[number // len(kinds) % len(words)]


def user_prefix(tokenizer: Any) -> list[int]:
    """The ids of the chat template up to where the user's words begin."""
    mark = "\x00"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, _ = text.partition(mark)
    if not found:
        raise ValueError("this tokenizer's chat template does not repeat the user's words; give prompts")
    return list(tokenizer(before, add_special_tokens=False).input_ids)


def ask(llm: LLM, tokenizer: Any, numbers: Sequence[int], seed: int, longest: int) -> list[Asked]:
    """Questions `numbers` of a run; those that did not end within `longest` tokens, or are empty, are left out."""
    prefix = user_prefix(tokenizer)
    begun = [opening(n) for n in numbers]
    prompts = [[*prefix, *tokenizer(words, add_special_tokens=False).input_ids] for _, words in begun]
    params = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=longest, seed=seed * 2**24 + n) for n in numbers]
    found = []
    for number, (kind, words), output in zip(numbers, begun, llm.generate(prompts, params), strict=True):
        ended = output.outputs[0].finish_reason == "stop"
        text = (words + output.outputs[0].text).strip()
        if ended and len(text) >= LEAST:
            found.append(Asked(number, kind, text))
    return found


def answer(llm: LLM, tokenizer: Any, asked: Sequence[Asked], seed: int, longest: int) -> Iterator[dict[str, Any]]:
    """Records of the questions with their answers, half greedy, half sampled."""
    temperatures = [TEMPERATURES[(a.number // len(OPENINGS)) % len(TEMPERATURES)] for a in asked]
    params = [
        SamplingParams(temperature=t, top_p=0.95 if t else 1.0, max_tokens=longest, seed=seed * 2**24 + a.number)
        for a, t in zip(asked, temperatures, strict=True)
    ]
    outputs = llm.generate([prompt_ids(tokenizer, a.prompt) for a in asked], params)
    for a, temperature, output in zip(asked, temperatures, outputs, strict=True):
        yield {
            "source": f"asked_{a.kind}",
            "number": a.number,
            "prompt": a.prompt,
            "temperature": temperature,
            "response_ids": list(output.outputs[0].token_ids),
        }


def read_own(path: Path) -> list[dict[str, Any]]:
    """The records of a file of this command; another's file is an error."""
    records = read_written(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not {"number", "prompt", "response_ids"} <= record.keys():
            raise ValueError(f"record {number} of {path} was not written by this command; give another file")
    return records


def run(llm: LLM, tokenizer: Any, path: Path, *, num: int, seed: int, longest: tuple[int, int], until: float) -> int:
    """Ask and answer `num` questions or until the clock (time.monotonic) passes `until`; return the answers' tokens.

    A file that is there is continued behind its last question (those left out behind it are asked again, and left out
    again); a question asked before is not kept again.
    """
    records = read_own(path)
    known = {r["prompt"] for r in records}
    tokens = sum(len(r["response_ids"]) for r in records)
    first = max((r["number"] for r in records), default=-1) + 1
    began, before = time.monotonic(), tokens
    path.parent.mkdir(parents=True, exist_ok=True)
    for at in range(first, num, GROUP):
        if time.monotonic() > until:
            break
        asked = []
        for question in ask(llm, tokenizer, range(at, min(num, at + GROUP)), seed, longest[0]):
            if question.prompt not in known:
                known.add(question.prompt)
                asked.append(question)
        found = list(answer(llm, tokenizer, asked, seed, longest[1]))
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
        tokens += sum(len(r["response_ids"]) for r in found)
        speed = (tokens - before) / (time.monotonic() - began)
        logger.info(
            "%d of %d asked, %d kept, %d answer tokens, %.0f/s", min(num, at + GROUP), num, len(known), tokens, speed
        )
    return tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    flags = argparse.ArgumentParser(
        prog="python -m draft_models.prompts", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    flags.add_argument("--target", default="smollm2-135m", help="model whose questions and answers these are")
    flags.add_argument("--out", type=Path, required=True, help="JSON lines, a --data of draft_models.train; continued")
    flags.add_argument("--num", type=int, default=10_000, help="questions to ask, those left out included")
    flags.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    flags.add_argument("--question-length", type=int, default=128, help="tokens a question may have")
    flags.add_argument("--answer-length", type=int, default=256, help="tokens at which answers are cut")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args(argv)
    for name in ("num", "minutes", "question_length", "answer_length"):
        if not getattr(args, name) > 0:
            flags.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if not 0 <= args.seed < 2**24:
        flags.error(f"--seed is {args.seed}; it must be from 0 to {2**24 - 1}")
    try:
        read_own(args.out)
    except (OSError, ValueError) as error:
        flags.error(f"--out is {args.out}, which cannot be continued: {error}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    llm = LLM(args.target, draft="ngram")
    if llm.tokenizer is None:
        raise ValueError(f"{args.target} has no tokenizer")
    longest = (args.question_length, args.answer_length)
    until = time.monotonic() + 60 * args.minutes
    run(llm, llm.engine.target.model.tokenizer, args.out, num=args.num, seed=args.seed, longest=longest, until=until)


if __name__ == "__main__":
    main()
