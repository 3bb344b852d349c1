"""Flags, variables, and a whole life of the server: start, serve, SIGTERM, end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.async_engine import AsyncEngine
from specdec.errors import InvalidRequestError, ModelLoadError
from specdec.server.app import create_app
from specdec.server.cli import DrainingServer, main, make_server
from specdec.server.flags import (
    OTHER_VARIABLES,
    _variables,
    make_parser,
    model_name,
    parse_config,
    parse_flags,
    parse_options,
    unknown_variables,
)
from specdec.server.options import ServerOptions
from tests.server.scripted import scripted_engine
from tests.server.support import events, wait_for

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_need_no_flags() -> None:
    args = parse_flags([], {})
    config = parse_config(args)
    assert config.target.model == model_name(args) == "smollm2-135m"
    assert parse_options(args) == ServerOptions() and args.port == 8000 and args.host == "127.0.0.1"


CHANGES: list[tuple[str, str, Any]] = [
    ("--target", "elsewhere", lambda c: c.target.model),
    ("--draft", "none", lambda c: c.speculative.method),
    ("--num-speculative-tokens", "3", lambda c: c.speculative.num_speculative_tokens),
    ("--speculative-config", '{"prompt_lookup_max": 7}', lambda c: c.speculative.prompt_lookup_max),
    ("--dtype", "float32", lambda c: c.target.dtype),
    ("--device", "cpu", lambda c: c.target.device),
    ("--max-model-len", "99", lambda c: c.target.max_model_len),
    ("--seed", "5", lambda c: c.seed),
    ("--max-num-seqs", "7", lambda c: c.scheduler.max_num_seqs),
    ("--max-num-batched-tokens", "77", lambda c: c.scheduler.max_num_batched_tokens),
    ("--block-size", "32", lambda c: c.cache.block_size),
    ("--kv-cache-memory", "123456", lambda c: c.cache.kv_cache_memory),
    ("--kv-cache-dtype", "fp8", lambda c: c.cache.kv_cache_dtype),
    ("--num-kv-blocks", "9", lambda c: c.cache.num_kv_blocks),
    ("--gpu-memory-utilization", "0.5", lambda c: c.cache.gpu_memory_utilization),
    ("--no-prefix-caching", "", lambda c: c.cache.enable_prefix_caching),
]


@pytest.mark.parametrize("flag, value, read", CHANGES, ids=[flag for flag, _, _ in CHANGES])
def test_every_engine_flag_changes_something_also_as_a_variable(flag: str, value: str, read: Any) -> None:
    words = ["--max-num-seqs", "7"] if flag == "--max-num-batched-tokens" else []
    given = parse_config(parse_flags([*words, flag, *([value] if value else [])], {}))
    variable = "SPECDEC_" + flag[2:].replace("-", "_").upper()
    assert read(given) != read(parse_config(parse_flags([], {})))
    assert read(given) == read(parse_config(parse_flags(words, {variable: value or "1"})))


def test_every_server_option_has_a_flag() -> None:
    numbers = ["max-body-bytes", "body-timeout-seconds", "max-waiting", "max-requests-per-key"]
    numbers += ["request-timeout-seconds", "drain-timeout-seconds"]
    words = [f"--{name}={9 - i}" for i, name in enumerate(numbers)]
    words += ["--api-key", "a", "--api-key", "b", "--cors-origin", "http://c", "--log-prompts"]
    options = parse_options(parse_flags(words, {}))
    assert options == ServerOptions(
        api_keys=("a", "b"), cors_origins=("http://c",), log_prompts=True, max_body_bytes=9, body_timeout_seconds=8,
        max_waiting=7, max_requests_per_key=6, request_timeout_seconds=5, drain_timeout_seconds=4,
    )  # fmt: skip
    assert parse_options(parse_flags([], {"SPECDEC_API_KEY": "a, b"})).api_keys == ("a", "b")
    assert parse_flags([], {"SPECDEC_PORT": "99", "SPECDEC_HOST": "::1"}).port == 99
    assert parse_flags(["--port", "7"], {"SPECDEC_PORT": "99"}).port == 7


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    assert parse_options(parse_flags(["--api-key-file", str(file)], {})).api_keys == ("one", "two")
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\n  # as editors elsewhere write it\r\ntwo words\r\n")
    assert parse_options(parse_flags(["--api-key-file", str(file)], {})).api_keys == ("one", "two words")
    for raw in (b"a\x00b\n", "schlüssel\n".encode()):  # no header can carry them: they would lock everybody out
        file.write_bytes(raw)
        with pytest.raises(InvalidRequestError, match="api_keys"):
            parse_options(parse_flags(["--api-key-file", str(file)], {}))
    file.write_text("# none\n")
    for path in (file, tmp_path / "absent"):
        with pytest.raises(InvalidRequestError, match="api_key_file"):
            parse_options(parse_flags(["--api-key-file", str(path)], {}))


@pytest.mark.parametrize(
    "words, environ",
    [
        (["--port", "x"], {}),
        (["--nonsense"], {}),
        (["--speculative-config", "{"], {}),
        ([], {"SPECDEC_NO_ADAPTIVE": "maybe"}),
        ([], {"SPECDEC_PORT": "x"}),
    ],
)
def test_bad_flags_end_with_usage(words: list[str], environ: dict[str, str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse_flags(words, environ)
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("SPECDEC_PORT", "", "cannot be"),
        ("SPECDEC_PORT", "70000", "cannot be"),
        ("SPECDEC_PORT", "tcp://10.0.0.1:8000", "enableServiceLinks"),
        ("SPECDEC_MAX_NUM_SEQS", "many", "cannot be"),
        ("SPECDEC_KV_CACHE_MEMORY", "1GB", "cannot be"),
        ("SPECDEC_SPECULATIVE_CONFIG", "{", "cannot be"),
        ("SPECDEC_DTYPE", "float99", "one of auto, "),
        ("SPECDEC_LOG_PROMPTS", "perhaps", "1 or 0"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse_flags([], {name: value})
    said = capsys.readouterr().err
    assert name in said and repr(value) in said and says in said


def test_a_variable_that_is_no_flag_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is not made because its name is misspelt must not be silent."""
    typos = ["SPECDEC_ENABLE_PREFIX_CACHING", "SPECDEC_MAX_NUM_SEQ"]
    for name in (*typos, "SPECDEC_CACHE", "SPECDEC_SEED"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables(os.environ) == typos
    monkeypatch.setattr("specdec.server.cli.make_server", lambda *args: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        main([])
    assert all(any(name in record.getMessage() for record in caplog.records) for name in typos)


def test_every_variable_of_ours_that_is_no_flag_is_known_as_such() -> None:
    sources = [path for room in ("specdec", "kernels") for path in (ROOT / room).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"SPECDEC_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    assert read - set(_variables(make_parser())) - {"SPECDEC_"} == set(OTHER_VARIABLES)


def test_the_readme_names_flags_that_exist_and_help_names_all() -> None:
    """A --flag in the README is the server's or an evaluation's; the former are all in --help."""
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    text = make_parser().format_help()
    assert all(flag in text for flag in flags)
    sources = [path for room in ("evals", "draft_models") for path in (ROOT / room).glob("*.py")]
    others = "".join(path.read_text(encoding="utf-8") for path in sources)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme))
    assert said - flags == {flag for flag in said - flags if f'"{flag}"' in others}
    assert len(said & flags) > 10


def test_bad_values_are_refused_with_the_remedy() -> None:
    for words in (["--num-speculative-tokens", "-1"], ["--speculative-config", "[]"], ["--block-size", "0"]):
        with pytest.raises(InvalidRequestError):
            parse_config(parse_flags(words, {}))
    with pytest.raises(InvalidRequestError):
        parse_options(parse_flags(["--request-timeout-seconds", "nan"], {}))


def test_help_tells_every_flag() -> None:
    text = make_parser().format_help()
    assert all(flag in text for flag, _, _ in CHANGES)


def test_help_and_flags_cost_no_torch() -> None:
    code = "import sys, specdec.server.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    assert model_name(parse_flags(["--target", str(tmp_path)], {})) == tmp_path.name
    assert model_name(parse_flags(["--served-model-name", "m"], {})) == "m"


def start(load: Any, options: ServerOptions) -> tuple[DrainingServer, threading.Thread, str]:
    """A server in a thread, as soon as it listens."""
    server = make_server(load, options, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    return server, thread, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def test_while_the_model_loads_the_server_is_alive_but_not_ready() -> None:
    loaded = threading.Event()

    def load() -> Any:
        loaded.wait(60)
        return create_app(AsyncEngine(scripted_engine()), "toy")

    server, thread, address = start(load, ServerOptions())
    assert httpx.get(f"{address}/health").json() == {"status": "loading"}
    for answer in (httpx.get(f"{address}/ready"), httpx.post(f"{address}/v1/completions", json={"prompt": "the "})):
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
    loaded.set()
    wait_for(lambda: httpx.get(f"{address}/ready").status_code == 200)
    assert httpx.post(f"{address}/v1/completions", json={"prompt": "the "}).status_code == 200
    server.handle_exit(signal.SIGTERM, None)
    thread.join(60)
    assert not thread.is_alive() and server.loading_error is None


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    is_listening = threading.Event()

    def load() -> Any:
        is_listening.wait(60)
        raise ModelLoadError("no such model")

    server, thread, _ = start(load, ServerOptions())
    is_listening.set()
    thread.join(60)
    assert not thread.is_alive() and isinstance(server.loading_error, ModelLoadError)


def test_a_signal_while_loading_ends_the_server_at_once() -> None:
    never = threading.Event()
    server, thread, _ = start(lambda: never.wait(60), ServerOptions())
    server.handle_exit(signal.SIGTERM, None)
    thread.join(60)
    assert not thread.is_alive()
    never.set()


@pytest.mark.parametrize("limit, is_whole", [(60.0, True), (0.1, False)])
def test_draining_has_a_limit(limit: float, is_whole: bool) -> None:
    engine = scripted_engine(seconds=0.01)
    options = ServerOptions(drain_timeout_seconds=limit)
    server, thread, address = start(lambda: create_app(AsyncEngine(engine), "toy", options), options)
    wait_for(lambda: httpx.get(f"{address}/ready").status_code == 200)
    url = f"{address}/v1/completions"
    body = {"prompt": "the ", "max_tokens": 50, "stream": True}
    with httpx.stream("POST", url, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        rest = [line for line in lines if line]
    thread.join(60)
    assert not thread.is_alive() and not engine.has_work
    assert (json.loads(rest[-2].removeprefix("data: ")).get("error") is None) is is_whole
    assert rest[-1] == "data: [DONE]"


@pytest.fixture
def process(toy: str) -> Any:
    """A server process on a free port, with all the time it may need to drain; gives it and its address."""
    environ = {
        **os.environ,
        "SPECDEC_MAX_NUM_SEQS": "8",
        "SPECDEC_DRAIN_TIMEOUT_SECONDS": "600",
        "PYTHONUNBUFFERED": "1",
    }
    words = ["--target", toy, "--draft", "ngram", "--port", "0", "--num-kv-blocks", "512"]
    started = subprocess.Popen([sys.executable, "serve.py", *words], stderr=subprocess.PIPE, text=True, env=environ)
    try:
        assert started.stderr is not None
        address = next(line.split("listening: ")[1].split("/v1")[0] for line in started.stderr if "listening: " in line)
        next(line for line in started.stderr if "ready after" in line)
        threading.Thread(target=started.stderr.read, daemon=True).start()
        yield started, address
    finally:
        started.kill()
        started.wait()


async def until(client: httpx.AsyncClient, path: str, holds: Callable[[httpx.Response], bool]) -> None:
    """Ask until the answer is as wanted; the test's own limit ends it otherwise."""
    while not holds(await client.get(path)):
        await asyncio.sleep(0.005)


def test_sigterm_lets_running_and_queued_requests_end(process: Any) -> None:
    """Eight streams run and one waits when the signal comes; all nine end, and the tenth is refused meanwhile."""
    started, address = process

    async def read(client: httpx.AsyncClient) -> str:
        body = {"prompt": "abc", "max_tokens": 450, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            return "".join([line + "\n" async for line in answer.aiter_lines()])

    async def use() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
            readers = [asyncio.create_task(read(client)) for _ in range(9)]
            await until(client, "/metrics", lambda a: "specdec:num_requests_waiting 1.0" in a.text)
            started.send_signal(signal.SIGTERM)
            await until(client, "/ready", lambda a: a.status_code == 503)
            assert (await client.post("/v1/completions", json={"prompt": "abc"})).status_code == 503
            assert not any(reader.done() and reader.exception() for reader in readers)
            for text in await asyncio.gather(*readers):
                assert events(text)[-1]["choices"][0]["finish_reason"] == "length"

    asyncio.run(asyncio.wait_for(use(), 240))
    assert started.wait(60) == 0


@pytest.mark.parametrize("after", ["listening: ", "Loading weights"])
def test_sigterm_while_the_model_loads_ends_the_process_without_a_fault(toy: str, after: str) -> None:
    """Its thread is in native code, which aborts a process that is taken down around it (exit status 134)."""
    words = ["--target", toy, "--draft", "none", "--port", "0", "--num-kv-blocks", "512"]
    started = subprocess.Popen([sys.executable, "serve.py", *words], stderr=subprocess.PIPE, text=True)
    try:
        assert started.stderr is not None
        next(line for line in started.stderr if after in line)
        started.send_signal(signal.SIGTERM)
        said = started.stderr.read()
        assert started.wait(60) == 0 and "terminate called" not in said
    finally:
        started.kill()
        started.wait()
