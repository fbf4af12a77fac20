"""The core stays importable without the host, and imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "openrlhf_bipace"
HOST = {"openrlhf", "ray", "vllm", "deepspeed"}
PURE = ["advantages", "clustering", "envs", "rollout.agent"]

# A module may import from lower layers and from its own package. To add a package, give it a layer here.
LAYERS = {
    "records": 0,
    "config": 0,
    "runs": 0,
    "advantages": 1,
    "clustering": 1,
    "envs": 1,
    "data": 2,
    "rollout": 2,
    "lab": 3,
    "evaluation": 3,
    "integration": 3,
    "report": 3,
    "launch": 4,
    "cli": 5,
}
# The two edges inside a layer: what a partition and an action key are made of.
SIDEWAYS = {("advantages", "clustering"), ("advantages", "envs.actions")}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the package imports by full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("file", FILES)
def test_imports_go_one_way(file):
    own = file.removesuffix(".py").split("/")[0]
    for name in imports(FILES[file]):
        top, _, inner = name.partition(".")
        if top != PACKAGE.name or not inner or inner.startswith("__"):
            continue
        other = inner.split(".")[0]
        assert own == "__init__" or own in LAYERS, f"{file}: give the package {own!r} a layer in this test"
        sideways = any(own == a and f"{inner}.".startswith(f"{b}.") for a, b in SIDEWAYS)
        allowed = own == other or sideways or LAYERS[own] > LAYERS[other]
        assert allowed, f"{file} imports {name}: {own} is not above {other}"


@pytest.mark.parametrize("file", [f for f in FILES if not f.startswith("integration/")])
def test_only_integration_imports_the_host(file):
    names = {name.split(".")[0] for name in imports(FILES[file])}
    assert not names & HOST, f"{file} imports {names & HOST}; only integration/ may"


def test_the_package_root_imports_nothing():
    assert imports(PACKAGE / "__init__.py") <= {"__future__.annotations"}


def test_the_core_loads_neither_the_host_nor_transformers():
    wanted = ", ".join(f"{PACKAGE.name}.{module}" for module in PURE)
    banned = sorted(HOST | {"transformers"})
    code = f"import sys, {wanted}; print([name for name in {banned} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
