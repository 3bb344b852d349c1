"""Write tests/reference.json: what transformers says of the default model, greedy in fp32.

Run `python -m tests.make_reference` after a change of versions; the tests compare the engine with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from specdec.models.sources import resolve
from specdec.tokenizer import Tokenizer

FILE = Path(__file__).parent / "reference.json"
NUM_TOKENS = 48
PROMPTS = [
    "What is the capital of France?",
    "List five fruits and say which colour each one has.",
    "Write a Python function that returns the factorial of n.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "A train leaves at 9 and arrives at 14. How long does the journey take?",
    "Translate to French: good morning, my friend.",
    "Summarise in one sentence: The sea covers most of the planet. It stores heat, feeds people and carries ships.",
    "Tell me a very short story about a lighthouse.",
]


def main() -> None:
    path = resolve("smollm2-135m")
    tokenizer = Tokenizer(transformers.AutoTokenizer.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_TOKENS,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        gaps = [float(s[0].topk(2).values.diff().abs()) for s in out.logits]
        rows.append(
            {"prompt_ids": ids, "ids": out.sequences[0, len(ids) :].tolist(), "gaps": [round(g, 6) for g in gaps]}
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    FILE.write_text(json.dumps({"versions": versions, "dtype": "float32", "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
