"""What type checkers say of a user's files: options and results have types, mistakes are found.

The files are `tests/typing/*.py`; a line that ends in `# error` is one that a type checker must refuse.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dnnc.options import CompileOptions, Options

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests/typing").glob("*.py"))
PYRIGHT = shutil.which("pyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

# What has a result that depends on values: the value of an array, the contents of a file, another library's type.
DYNAMIC = {
    "Array.item", "Array.tolist", "load_arrays", "Module.forward", "Module.get_parameter",
    "SparseArray.to_scipy", "bsr_array.to_scipy", "coo_array.to_scipy", "csr_array.to_scipy",
    "plain",
}  # fmt: skip


def test_the_typed_options_are_those_of_the_class() -> None:
    assert Options.__optional_keys__ == {f.name for f in dataclasses.fields(CompileOptions)}


def members() -> Iterator[tuple[str, Any]]:
    """(name, function) of the public functions and methods, each once."""
    seen: set[int] = set()
    packages = ("dnnc", "dnnc.array", "dnnc.array.fft", "dnnc.array.linalg", "dnnc.array.sparse", "dnnc.nn")
    for package in (*packages, "dnnc.nn.functional", "dnnc.optim", "dnnc.random"):
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]:
            thing = getattr(module, name)
            found = [(name, thing)]
            if inspect.isclass(thing):
                own = [c for c in thing.__mro__ if c.__module__.startswith("dnnc")]
                found = [(f"{c.__qualname__}.{n}", m) for c in own for n, m in vars(c).items() if public(n)]
            for full, member in found:
                member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if inspect.isfunction(member) and member.__module__.startswith("dnnc") and id(member) not in seen:
                    seen.add(id(member))
                    yield full, member


def public(name: str) -> bool:
    return not name.startswith("_") or name in ("__call__", "__getitem__", "__iter__", "__enter__")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing keeps no overloads")
def test_no_result_is_any() -> None:
    overloads = typing.get_overloads  # type: ignore[attr-defined, unused-ignore]
    told = dict(members())
    untyped = {
        n for n, f in told.items() if not overloads(f) and f.__annotations__.get("return", "Any") in (Any, "Any")
    }
    assert len(told) > 600
    assert not untyped - DYNAMIC


def expected(path: Path) -> set[int]:
    return {k for k, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# error")}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package by its installed name, beside the files of the user."""
    folder = tmp_path_factory.mktemp("user")
    package = folder / "tree" / "dnnc"
    package.mkdir(parents=True)
    for p in (ROOT / "compiler").iterdir():
        (package / p.name).symlink_to(p)
    for layer in ("ir", "passes", "backends", "autotune"):
        (package / layer).symlink_to(ROOT / layer)
    for p in FILES:
        shutil.copy(p, folder)
    return folder


@pytest.mark.slow
def test_mypy(tree: Path) -> None:
    flags = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", str(tree / "cache")]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *(p.name for p in FILES)],
        cwd=tree,
        env={**env, "MYPYPATH": str(tree / "tree")},
        capture_output=True,
        text=True,
        timeout=400,
    )
    found: dict[str, set[int]] = {p.name: set() for p in FILES}
    for line in done.stdout.splitlines():
        if ": error:" in line:
            name, number, _ = line.split(":", 2)
            found[name].add(int(number))
    assert found == {p.name: expected(p) for p in FILES}, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_pyright(tree: Path) -> None:
    settings = {"include": [p.name for p in FILES], "typeCheckingMode": "strict", "extraPaths": ["tree"]}
    (tree / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=400,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not start: {done.stderr[-300:]}")  # its first start loads a package
    found: dict[str, set[int]] = {p.name: set() for p in FILES}
    for d in json.loads(done.stdout[done.stdout.index("{") :])["generalDiagnostics"]:
        if d["severity"] == "error":
            found[Path(d["file"]).name].add(d["range"]["start"]["line"] + 1)
    assert found == {p.name: expected(p) for p in FILES}, done.stdout
