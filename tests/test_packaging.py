"""Packaging: another distribution called `kernels` beside us breaks nothing, from a checkout or a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_PROBE = """
import kernels
assert kernels.__file__.startswith(SITE), kernels.__file__
from transformers import LlamaForCausalLM
import specdec
from specdec.kernels import paged_attention
assert not paged_attention.__file__.startswith(SITE)
llm = specdec.LLM(TOY, "ngram", dtype="float32", num_kv_blocks=8)
[out] = llm.generate([[1, 2, 3]], specdec.SamplingParams(max_tokens=3, ignore_eos=True))
assert len(out.outputs[0].token_ids) == 3
print("FROM", specdec.__file__)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A distribution of that name, of a version transformers passes over."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels/__init__.py").write_text('__version__ = "0.1.0"\n')
    info = site / "kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n")
    return site


def _run(toy: str, path: list[Path], cwd: Path) -> str:
    """Run the probe with `path` in front; path[0] holds the other kernels. Returns where specdec came from."""
    probe = _PROBE.replace("TOY", repr(toy)).replace("SITE", repr(str(path[0])))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_a_checkout_lives_beside_another_kernels(toy: str, stand_in: Path, tmp_path: Path) -> None:
    assert str(ROOT) in _run(toy, [stand_in, ROOT], tmp_path)


@pytest.mark.slow
def test_the_published_kernels_wins_its_name_and_both_work(toy: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site), "kernels"]
    subprocess.run(command, check=True)
    assert str(ROOT) in _run(toy, [site, ROOT], tmp_path)


def test_a_wheel_is_whole_and_lives_beside_another_kernels(toy: str, stand_in: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(wheels), str(ROOT)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-2000:]
    [wheel] = wheels.glob("specdec_engine-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    top = {name.split("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"specdec"}
    shipped = {f"specdec/drafts/smollm2-135m/{p.name}" for p in (ROOT / "draft_models/smollm2-135m").iterdir()}
    assert shipped <= set(names) and "specdec/drafts/smollm2-135m/model.safetensors" in shipped
    sources = {p.name for p in (ROOT / "kernels/native").iterdir() if p.suffix in (".cpp", ".h")}
    assert sources <= {Path(name).name for name in names}
    assert str(installed) in _run(toy, [stand_in, installed], tmp_path)
