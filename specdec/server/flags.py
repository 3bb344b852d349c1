"""Flags: what can be said on the command line, or in a variable SPECDEC_<FLAG> of the environment.

It knows names, types and defaults, and turns them into configuration; it loads and starts nothing.
The command line wins over the environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.config import COMPILES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig, SpeculativeConfig
from specdec.errors import InvalidRequestError
from specdec.server.options import ServerOptions

PREFIX = "SPECDEC_"

_ENGINE_FLAGS = (
    "dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory",
    "num_kv_blocks", "gpu_memory_utilization", "enable_prefix_caching", "seed",
    "quantization", "num_threads", "compile", "kv_cache_dtype",
)  # fmt: skip
_OPTION_FLAGS = (
    "max_body_bytes", "body_timeout_seconds", "max_waiting", "max_requests_per_key", "log_prompts",
    "request_timeout_seconds", "drain_timeout_seconds", "max_queue_delay_ms",
)  # fmt: skip
OTHER_VARIABLES = frozenset({"SPECDEC_CACHE", "SPECDEC_KERNELS", "SPECDEC_AMX", "SPECDEC_GRAPHS"})
"""Variables with our prefix that are read elsewhere."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def _port(text: str) -> int:
    if not 0 <= (number := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is no port; ports are from 0 to 65535")
    return number


def make_parser() -> argparse.ArgumentParser:
    """All flags of the server."""
    parser = argparse.ArgumentParser(
        "specdec-serve",
        description="Serve a model over the OpenAI API, speculating.",
        epilog=f"Every flag may be given as a variable too: --max-num-seqs 8 is {PREFIX}MAX_NUM_SEQS=8.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server_flags(parser)
    _add_model_flags(parser)
    _add_cache_flags(parser)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group, default = parser.add_argument_group("server"), ServerOptions()
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    add("--port", type=_port, default=8000, help="0 takes a free one")
    add("--served-model-name", help="name in the API; without it the target's name")
    add("--api-key", action="append", default=[], help="a key clients must send; may be given several times")
    add("--api-key-file", type=Path, help="a file of keys, one a line; lines that begin with # are comments")
    add("--cors-origin", action="append", default=[], help="pages of this origin may call; may be given several times")
    add("--max-body-bytes", type=int, default=default.max_body_bytes, help="larger bodies are refused")
    add("--body-timeout-seconds", type=float, default=default.body_timeout_seconds, help="longest silence in a body")
    add("--max-waiting", type=int, default=default.max_waiting, help="requests that may wait; more get 429")
    add(
        "--max-requests-per-key", type=int, default=default.max_requests_per_key, help="running or waiting; 0: no limit"
    )
    add("--log-prompts", action="store_true", help="let the access log show what was asked")
    add("--request-timeout-seconds", type=float, default=default.request_timeout_seconds, help="0 sets no limit")
    add("--drain-timeout-seconds", type=float, default=default.drain_timeout_seconds, help="time to end after SIGTERM")
    add("--max-queue-delay-ms", type=float, default=default.max_queue_delay_ms, help="wait for company when idle")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="least level that is logged")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and speculation").add_argument
    add("--target", default="smollm2-135m", help="alias, hub id, directory or .gguf file")
    add("--draft", default="auto", help="model of the same tokenizer, 'ngram', 'suffix', 'hybrid', 'auto' or 'none'")
    add("--num-speculative-tokens", type=int, help="most drafts a request and step; 0: no speculation")
    add("--no-adaptive", action="store_true", help="keep draft lengths fixed")
    add("--speculative-trace", metavar="PATH", help="append the controller's decisions, a JSON line a step")
    add("--speculative-config", type=json.loads, default={}, metavar="JSON", help="fields of SpeculativeConfig")
    add("--dtype", choices=DTYPES, default="auto", help="precision of weights and cache")
    add("--quantization", choices=QUANTIZATIONS, default="none", help="bits of weights (and inputs: a8) on CPU")
    add("--compile", choices=COMPILES, default="auto", help="off: PyTorch's own operations; max: torch.compile too")
    add("--num-threads", type=int, help="threads of the CPU kernels; default: one a core the process may use")
    add("--device", default="auto", help="where the models run")
    add("--max-model-len", type=int, help="most tokens of a request, prompt and output together")
    add("--seed", type=int, default=0, help="seeds the requests that bring no seed")


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batching and cache").add_argument
    add("--max-num-seqs", type=int, default=64, help="most requests that run at once")
    add("--max-num-batched-tokens", type=int, help="most tokens of a step; default: 256 on CPU, else 512")
    add("--block-size", type=int, default=16, help="tokens a cache block holds")
    add("--kv-cache-memory", type=int, metavar="BYTES", help="cache of target and draft together")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of the target's keys and values")
    add("--num-kv-blocks", type=int, help="exact size of the cache instead")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the device's memory to use")
    add(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=True,
        help="never reuse the cache of an equal prefix",
    )


def parse_flags(argv: Sequence[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """Flags of the command line over variables of the environment over defaults."""
    parser = make_parser()
    words: list[str] = []
    for name, action in _variables(parser).items():
        if name in environ:
            words += _words(parser, name, action, environ[name])
    return parser.parse_args(words + list(sys.argv[1:] if argv is None else argv))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like flags and are none: each would be a setting that is silently not made."""
    known = {*_variables(make_parser()), *OTHER_VARIABLES}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def _variables(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What every variable stands for."""
    flags = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    del flags["--help"]
    return {PREFIX + flag.removeprefix("--").replace("-", "_").upper(): action for flag, action in flags.items()}


def _words(parser: argparse.ArgumentParser, name: str, action: argparse.Action, value: str) -> list[str]:
    """One variable as the words it would be on the command line; what is wrong with it is said of the variable."""
    flag = action.option_strings[-1]
    if action.nargs == 0:
        if value.lower() not in (*_TRUE, *_FALSE):
            parser.error(f"the variable {name} is {value!r}; it must be 1 or 0")
        return [flag] if value.lower() in _TRUE else []
    try:
        read = action.type(value) if callable(action.type) else value
    except (ValueError, argparse.ArgumentTypeError):
        hint = "; Kubernetes sets it for a service called specdec, enableServiceLinks: false stops that"
        parser.error(f"the variable {name} is {value!r}, which {flag} cannot be" + hint * value.startswith("tcp://"))
    if action.choices is not None and read not in action.choices:
        parser.error(f"the variable {name} is {value!r}; it must be one of {', '.join(map(str, action.choices))}")
    if isinstance(action.default, list):
        return [f"{flag}={part.strip()}" for part in value.split(",")]
    return [f"{flag}={value}"]


def parse_config(args: argparse.Namespace) -> EngineConfig:
    """What the engine is built from."""
    from specdec.llm import engine_config  # brings torch, which flags themselves do not need

    if not isinstance(args.speculative_config, dict):
        raise InvalidRequestError("speculative_config must be a JSON object", param="speculative_config")
    values: dict[str, Any] = dict(args.speculative_config)
    if args.num_speculative_tokens is not None:
        values["num_speculative_tokens"] = args.num_speculative_tokens
    if args.no_adaptive:
        values["adaptive"] = False
    if args.speculative_trace is not None:
        values["trace"] = args.speculative_trace
    draft = None if args.draft == "none" else args.draft
    engine_options = {name: getattr(args, name) for name in _ENGINE_FLAGS}
    return engine_config(args.target, draft, SpeculativeConfig.from_dict(values), **engine_options)


def parse_options(args: argparse.Namespace) -> ServerOptions:
    """How the server treats its clients."""
    keys = [*args.api_key, *(_read_keys(args.api_key_file) if args.api_key_file is not None else ())]
    plain = {name: getattr(args, name) for name in _OPTION_FLAGS}
    return ServerOptions(api_keys=tuple(keys), cors_origins=tuple(args.cors_origin), **plain)


def _read_keys(path: Path) -> list[str]:
    """Keys of a file; a file without any is an error, for it would leave the door open."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"api_key_file {path} cannot be read: {error}", param="api_key_file") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidRequestError(f"api_key_file {path} holds no key; write one a line", param="api_key_file")
    return keys


def model_name(args: argparse.Namespace) -> str:
    """The served name: as given, or the target's, a directory by its last part."""
    if args.served_model_name is not None:
        return str(args.served_model_name)
    path = Path(args.target)
    return path.resolve().name if path.exists() else str(args.target)
