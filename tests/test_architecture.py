"""The house rules, as tests: who imports whom, how long things may be, who may name a method."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "specdec", "draft_models", "evals")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "specdec": {"specdec", "kernels"},
    "draft_models": {"draft_models", "specdec", "kernels"},
    "evals": {"evals", "specdec", "kernels"},
}
METHODS = {"ngram", "draft_model", "eagle", "suffix", "hybrid"}
MAY_NAME_METHODS = {"specdec/proposers/__init__.py", "specdec/config.py", "specdec/assembly.py"}


def _files() -> list[Path]:
    found = [ROOT / "serve.py"] if (ROOT / "serve.py").exists() else []
    for room in ROOMS:
        found += [p for p in (ROOT / room).rglob("*.py") if "specdec/kernels" not in p.as_posix()]
    return sorted(found)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room_of_import(module: str) -> str | None:
    if module == "specdec.kernels" or module.startswith("specdec.kernels."):
        return "kernels"
    first = module.split(".")[0]
    return first if first in ROOMS and module != "specdec" else None


def uphill(room: str, source: str) -> list[str]:
    """Imports of a file that run uphill."""
    rooms = ((m, _room_of_import(m)) for m in _imports(ast.parse(source)))
    return [m for m, target in rooms if target is not None and target not in MAY_IMPORT[room]]


def test_imports_run_downhill() -> None:
    bad = {
        _name(p): found
        for p in _files()
        if p.name != "serve.py" and (found := uphill(_name(p).split("/")[0], p.read_text()))
    }
    assert not bad


def test_an_uphill_import_inside_a_function_is_caught() -> None:
    assert uphill("specdec", "def f():\n    from evals.load import drive") == ["evals.load", "evals.load.drive"]
    assert uphill("kernels", "from specdec.request import Request")
    assert not uphill("kernels", "from specdec.kernels import native")


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _is_face(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Public faces, custom ops and kernels take what their callers must be able to say."""
    return path.parent.name in {"kernels"} or "kernels/" in _name(path) or function.name in {"engine_config", "_attend"}


def test_files_and_functions_stay_under_their_ceilings() -> None:
    bad = []
    for path in _files():
        is_kernel = _name(path).startswith("kernels/")
        text = path.read_text()
        if text.count("\n") > (500 if is_kernel else 400):
            bad.append(f"{_name(path)} has {text.count(chr(10))} lines")
        for function in _functions(ast.parse(text)):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > (120 if is_kernel else 50):
                bad.append(f"{_name(path)}:{function.name} has {length} lines")
            arguments = [a for a in function.args.args + function.args.kwonlyargs if a.arg not in ("self", "cls")]
            if len(arguments) > 7 and not _is_face(path, function):
                bad.append(f"{_name(path)}:{function.name} takes {len(arguments)} parameters")
    assert not bad


def test_native_sources_stay_under_the_ceiling() -> None:
    sources = [*(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")]
    assert sources and not [p.name for p in sources if p.read_text().count("\n") > 500]


def test_values_that_flow_through_a_step_stay_small() -> None:
    tree = ast.parse((ROOT / "specdec/batch.py").read_text())
    sizes = {
        node.name: sum(isinstance(item, ast.AnnAssign) for item in node.body)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert sizes["Row"] <= 6 and max(sizes.values()) <= 12


def test_only_two_places_know_methods_by_name() -> None:
    bad = []
    for path in _files():
        if not _name(path).startswith("specdec/") or _name(path) in MAY_NAME_METHODS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                if constants & METHODS:
                    bad.append(f"{_name(path)}:{node.lineno}")
    assert not bad


def test_every_module_opens_with_a_sentence() -> None:
    assert not [_name(p) for p in _files() if not ast.get_docstring(ast.parse(p.read_text()))]


def test_no_module_is_called_utils() -> None:
    assert not [_name(p) for p in _files() if p.stem in {"utils", "helpers", "misc", "common"}]


@pytest.mark.parametrize("module", ["request", "batch", "block_pool", "scheduler", "controller", "control.adaptive"])
def test_planning_does_not_import_torch(module: str) -> None:
    code = f"import sys, specdec.{module}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_specdec_costs_nothing() -> None:
    code = "import sys, specdec; dir(specdec); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_name_can_be_imported() -> None:
    import specdec

    assert sorted(specdec._HOME) == sorted(specdec.__all__)
    assert all(getattr(specdec, name).__name__ == name for name in specdec.__all__)


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    packages = {
        f"specdec.{p.parent.relative_to(ROOT / 'specdec').as_posix().replace('/', '.')}"
        for p in (ROOT / "specdec").glob("*/__init__.py")
    } | {f"specdec.kernels.{p.parent.name}" for p in (ROOT / "kernels").glob("*/__init__.py")}
    assert not [p for p in packages if f'"{p}"' not in listed]
    assert not (ROOT / "kernels/__init__.py").exists()
