"""The command line: flags to an EngineConfig, an app and uvicorn.

It knows flags and their order of start; every decision behind them is made elsewhere.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn

from specdec.assembly import build
from specdec.async_engine import AsyncEngine
from specdec.config import DTYPES, EngineConfig, SpeculativeConfig
from specdec.errors import SpecdecError
from specdec.llm import engine_config
from specdec.server.app import create_app
from specdec.server.options import ServerOptions

_ENGINE_FLAGS = (
    "dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory",
    "num_kv_blocks", "gpu_memory_utilization", "enable_prefix_caching", "seed",
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """All flags of the server."""
    parser = argparse.ArgumentParser("specdec-serve", description="Serve a model over the OpenAI API, speculating.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--api-key", action="append", default=[], help="a key clients must send; may be given several times")
    add("--served-model-name", help="name in the API; default: what --target says")
    add("--target", default="smollm2-135m", help="alias, hub id, directory or .gguf file")
    add("--draft", default="auto", help="model of the same tokenizer, 'ngram', 'auto' or 'none'")
    add("--num-speculative-tokens", type=int, help="most drafts a request and step; 0 turns speculation off")
    add("--no-adaptive", action="store_true", help="keep draft lengths fixed")
    add("--speculative-config", type=json.loads, default={}, metavar="JSON", help="fields of SpeculativeConfig")
    add("--dtype", choices=DTYPES, default="auto")
    add("--device", default="auto")
    add("--max-model-len", type=int, help="most tokens of a request, prompt and output together")
    add("--max-num-seqs", type=int, default=64, help="most requests that run at once")
    add("--max-num-batched-tokens", type=int, default=512, help="most tokens of a step")
    add("--block-size", type=int, default=16, help="tokens a cache block holds")
    add("--kv-cache-memory", type=int, metavar="BYTES", help="cache of target and draft together")
    add("--num-kv-blocks", type=int, help="exact size of the cache instead")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the device's memory to use")
    add("--no-prefix-caching", dest="enable_prefix_caching", action="store_false", help="never reuse a prefix")
    add("--seed", type=int, default=0, help="seeds the requests that bring no seed")
    return parser


def parse_config(args: argparse.Namespace) -> EngineConfig:
    """What the engine is built from."""
    values: dict[str, Any] = dict(args.speculative_config)
    if args.num_speculative_tokens is not None:
        values["num_speculative_tokens"] = args.num_speculative_tokens
    if args.no_adaptive:
        values["adaptive"] = False
    draft = None if args.draft == "none" else args.draft
    engine_options = {name: getattr(args, name) for name in _ENGINE_FLAGS}
    return engine_config(args.target, draft, SpeculativeConfig.from_dict(values), **engine_options)


def model_name(args: argparse.Namespace) -> str:
    """The served name: as given, or the target's, a directory by its last part."""
    name: str = args.served_model_name or args.target
    return Path(name).name if args.served_model_name is None and Path(name).exists() else name


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server and stay until it is told to stop."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        engine = build(parse_config(args))
    except SpecdecError as error:
        raise SystemExit(f"specdec-serve: {error}") from error
    options = ServerOptions(api_keys=tuple(args.api_key))
    app = create_app(AsyncEngine(engine), model_name(args), options)
    uvicorn.run(app, host=args.host, port=args.port, log_config=None, access_log=False)
