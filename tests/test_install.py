"""Installing: editable and not, into a new environment without a network, and using it from the folder above a clone
that is named dnnc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "ir", "passes", "backends", "autotune", ".ci")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")

SCRIPT = """
import dnnc
import dnnc.array as xp
from dnnc.passes.rewrites import cse
print(dnnc.__file__, dnnc.__version__)
f = dnnc.compile(lambda x: x + 1, inputs=[dnnc.Spec((3,))], cache=False)
assert f([1.0, 2.0, 3.0]).tolist() == [2.0, 3.0, 4.0]
"""


def run(*command: object, cwd: Path, **variables: str) -> str:
    """The output of a command that must succeed, with no variable of this process that says where modules are."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, env={**env, **variables}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What is needed of the tree, in a folder named dnnc."""
    tree = tmp_path / "dnnc"
    tree.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    return tree


def packages() -> Path:
    """Where this process has setuptools and the dependencies from."""
    import numpy

    return Path(numpy.__file__).parents[1]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A new environment in which nothing but Python is installed; it sees the dependencies behind its own packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "zz_dependencies.pth").write_text(f"{packages()}\n")
    return tmp_path / "venv" / "bin" / "python"


def install(python: Path, tree: Path, *options: str) -> None:
    flags = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *flags, *options, tree, cwd=tree.parent)


def test_editable_from_the_folder_above(clone: Path, python: Path) -> None:
    install(python, clone, "--editable")
    above = clone.parent
    (above / "script.py").write_text(SCRIPT)
    for where in (above, clone, Path("/")):
        assert str(clone / "compiler" / "__init__.py") in run(python, above / "script.py", cwd=where)
        assert str(clone / "compiler" / "__init__.py") in run(python, "-c", SCRIPT, cwd=where)
        assert run(python, "-m", "dnnc", "--version", cwd=where).startswith("dnnc ")
    (clone / "ir" / "a_new_module.py").write_text("x = 7\n")  # is there at once
    assert run(python, "-c", "from dnnc.ir.a_new_module import x; print(x)", cwd=above) == "7\n"
    (above / "first" / "dnnc").mkdir(parents=True)
    (above / "first" / "dnnc" / "__init__.py").write_text("")
    assert "first" in run(
        python, "-c", "import dnnc; print(dnnc.__file__)", cwd=Path("/"), PYTHONPATH=str(above / "first")
    )
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--quiet", "--yes", "dnnc", cwd=Path("/"))
    assert str(clone) not in run(python, "-c", "import importlib.util as u; print(u.find_spec('dnnc'))", cwd=Path("/"))


def test_a_plain_install_from_the_folder_above(clone: Path, python: Path) -> None:
    install(python, clone)
    assert "site-packages" in run(python, "-c", SCRIPT, cwd=clone.parent)


def build(tree: Path, what: str) -> Path:
    code = f"import sys; sys.path.insert(0, '.ci'); import editable; print(editable.build_{what}('out'))"
    (tree / "out").mkdir(exist_ok=True)
    return tree / "out" / run(sys.executable, "-c", code, cwd=tree).splitlines()[-1]


def test_a_removed_module_is_not_in_the_next_wheel(clone: Path) -> None:
    (clone / "ir" / "stale.py").write_text("")
    assert "dnnc/ir/stale.py" in zipfile.ZipFile(build(clone, "wheel")).namelist()
    (clone / "ir" / "stale.py").unlink()
    (clone / "build" / "mine").mkdir(parents=True)
    assert "dnnc/ir/stale.py" not in zipfile.ZipFile(build(clone, "wheel")).namelist()
    assert (clone / "build" / "mine").exists()


def test_a_source_archive_builds(clone: Path, tmp_path: Path) -> None:
    with tarfile.open(build(clone, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked")
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert build(tree, "wheel").exists()
