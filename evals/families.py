"""Families: which model families the load gate serves and which it refuses, tried and not asserted.

    python -m evals.families --out evals/FAMILIES.md

It knows names of families. What is right is decided by the gate's own self-test: packed, chunked
forwards of a toy-sized config with random weights against transformers' eager attention.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tqdm import tqdm
from transformers import AutoConfig

from specdec import UnsupportedModelError
from specdec.models.fast_llama import FAMILIES as FAST
from specdec.models.gate import check_config
from specdec.models.selftest import TOLERANCE, measure
from specdec.models.shrink import shrink

NAMES = """
    apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5
    exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense jamba lfm2 llama
    llama4_text mamba mamba2 minimax minimax_m2 ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3
    stablelm starcoder2 vaultgemma xglm zamba2
"""

# What a family's own defaults leave open or a published checkpoint always sets.
_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16, "num_hidden_layers": 32},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "mistral": {"sliding_window": 6},
    "llama (dynamic rope)": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "llama (llama3 rope)": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama (linear rope)": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "llama (yarn rope)": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16
        }
    },
    "phi3 (longrope)": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48
        }
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One family tried.

    difference   of any logit, relative; None where it was refused before it could be measured
    reason       why it is refused; None where it is served
    """

    name: str
    difference: float | None
    reason: str | None

    @property
    def is_wrong(self) -> bool:
        """True for a family that ran and was not right; the gate refuses it at load."""
        return self.difference is not None and not self.difference < TOLERANCE


def try_family(name: str) -> Result:
    """Build the toy, measure it, or hear why not."""
    try:
        config = AutoConfig.for_model(name.split(" (")[0], **_SETTINGS.get(name, {}))
        check_config(config)
        difference = measure(shrink(config))
    except UnsupportedModelError as error:
        return Result(name, None, str(error))
    except Exception as error:  # the gate refuses what cannot be tried, with the same words
        return Result(name, None, f"could not be tried at a small size ({type(error).__name__})")
    wrong = None if difference < TOLERANCE else f"differs from eager attention by {difference:.1e}"
    return Result(name, difference, wrong)


def markdown(results: Sequence[Result]) -> str:
    """Two tables, served and refused."""
    served = [r for r in results if r.reason is None]
    refused = [r for r in results if r.reason is not None]
    fast = ", ".join(sorted(cls.__name__.removesuffix("ForCausalLM") for cls in FAST))
    lines = [
        "# Model families, tried",
        "",
        f"Made by `python -m evals.families` with transformers {transformers.__version__}. Each family was built at a",
        "toy size with random weights; two requests shared every forward and their prompts were cut at odd places,",
        f"beyond sliding windows and across block edges. Served: every logit within {TOLERANCE:.0e} of transformers'",
        "eager attention in fp32. The same test runs when a model is loaded, so the gate and this list agree.",
        f"{fast} run through the native forward on CPU (tried as well), the others through transformers' modules.",
        "One table of blocks serves all layers: windowed layers keep keys they no longer read.",
        "",
        f"## Served ({len(served)})",
        "",
        "| family | largest difference |",
        "|---|---|",
        *(f"| {r.name} | {r.difference:.1e} |" for r in served),
        "",
        f"## Refused ({len(refused)})",
        "",
        "| family | why |",
        "|---|---|",
        *(f"| {r.name} | {(r.reason or '').replace('|', '/')} |" for r in refused),
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the list; return 1 when fewer than 30 families are served."""
    parser = argparse.ArgumentParser(prog="python -m evals.families", description=__doc__)
    parser.add_argument("--out", type=Path, help="write Markdown here instead of printing it")
    options = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    names = sorted([*NAMES.split(), *(name for name in _SETTINGS if " (" in name)])
    results = [try_family(name) for name in tqdm(names, desc="families", disable=None)]
    if options.out:
        options.out.write_text(markdown(results))
    else:
        print(markdown(results))
    return int(sum(r.reason is None for r in results) < 30)


if __name__ == "__main__":
    sys.exit(main())
