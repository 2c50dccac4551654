"""The rules for the whole tree: who may import whom, how long a file may be, what code may not hold."""

from __future__ import annotations

import ast
import gc
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from support.times import in_a_quiet_round, quiet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    "ir",
    "passes",
    "backends",
    "autotune",
    "compiler",
)  # a module imports from its own layer and from those to the left
MAX_LINES = 600
# Heavy modules, and where alone they may be imported.
HOMES = {
    "llvmlite": ("backends/llvm",),
    "cupy": ("backends/cuda", "backends/runtime", "compiler/driver.py"),
    "cupy_backends": ("backends/cuda",),
    "onnx": (
        "compiler/export",
        "compiler/frontends/onnx",
        "compiler/testing",
        "compiler/onnx_backend.py",
        "compiler/pruning",
        "compiler/quantization",
        "compiler/driver.py",
    ),
    "typer": ("compiler/cli",),
    "rich": ("compiler/cli", "compiler/report"),
    "xgboost": ("autotune",),
    "ray": ("autotune/runners/ray_runner.py",),
    "plotly": ("compiler/report",),
    "torch": ("compiler/frontends/torch", "compiler/torch/", "compiler/tools/peers.py", "backends/runtime/arrays.py"),
}
# Where an op is known by its name: its record, what imports it, and rules that are rooted at it.
RULES_BY_NAME = ("ir/ops/", "compiler/frontends/", "passes/rewrites/idioms.py", "passes/rewrite.py")
MAX_NAME_TESTS = 22  # elsewhere; may only fall
# Caches that are filled at run time; every other module-level container is a constant.
MUTABLE_GLOBALS = {("ir/expr.py", "_table"), ("ir/dtype.py", "_BY_NUMPY")}
ZOO = (
    "resnet vgg alexnet densenet googlenet inception mobilenet efficientnet squeezenet shufflenet convnext bert minilm "
    "gpt2? llama whisper "
    "unet yolo vit silero magika dnsmos aecmos ppocr ddddocr rxnmap attacut khmersm swift_f0 mnist"
).split()


def sources() -> list[Path]:
    """Every Python file of the package."""
    return [p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]


def everything() -> list[Path]:
    return [*sources(), *(p for d in ("tests", "examples", "benchmarks") for p in sorted((ROOT / d).rglob("*.py")))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name_of(path))


@cache
def nodes() -> dict[Path, tuple[list[ast.stmt], list[ast.AST]]]:
    """Of every Python file of the package the assignments at module level, and all imports, `global`s, literal
    containers, comparisons and calls.

    The rules need few of the 800,000 nodes; a garbage collector that goes through them meanwhile takes ten times as
    long as parsing.
    """
    kinds = (ast.Import, ast.ImportFrom, ast.Global, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Compare, ast.Call)
    gc.disable()
    found = {}
    for p in sources():
        tree = tree_of(p)
        assigned = [s for s in tree.body if isinstance(s, (ast.Assign, ast.AnnAssign))]
        found[p] = assigned, [n for n in ast.walk(tree) if isinstance(n, kinds)]
    gc.enable()
    return found


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too; `from a.b import c` counts as a.b.c."""
    found = []
    for n in nodes()[path][1]:
        if isinstance(n, ast.Import):
            found += [(n.lineno, a.name) for a in n.names]
        elif isinstance(n, ast.ImportFrom):
            assert n.level == 0, f"{name_of(path)}:{n.lineno}: relative import; write it out from dnnc"
            found += [(n.lineno, f"{n.module}.{a.name}") for a in n.names]
    return found


def layer_of(module: str) -> str:
    """The layer of a dotted name below dnnc."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[:-1] else "compiler"


def report(bad: list[str]) -> None:
    assert not bad, "\n" + "\n".join(bad)


# --- imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_imports_go_one_way() -> None:
    bad = []
    for p in sources():
        mine = name_of(p).split("/")[0]
        for line, module in imports(p):
            if module.split(".")[0] == "dnnc" and LAYERS.index(layer_of(module)) > LAYERS.index(mine):
                bad.append(f"{name_of(p)}:{line}: {mine} may not import {module}")
    report(bad)


@pytest.mark.slow
def test_a_backend_is_imported_by_itself_alone() -> None:
    """Everything else finds it through the registry, which names modules in strings."""
    bad = []
    for p in sources():
        for line, module in imports(p):
            parts = module.split(".")
            one = parts[:2] == ["dnnc", "backends"] and len(parts) > 2 and (ROOT / "backends" / parts[2] / "backend.py")
            if one and one.exists() and one.parent not in p.parents:
                bad.append(f"{name_of(p)}:{line}: {module} belongs to one backend; ask dnnc.backends.registry")
    report(bad)


@pytest.mark.slow
def test_frontends_see_the_ir_alone() -> None:
    bad = []
    for p in sorted((ROOT / "compiler/frontends").rglob("*.py")):
        arrays = ("dnnc.array", "dnnc.pytree") if p.parent.name == "trace" else ()  # which are what it reads
        for line, module in imports(p):
            if module.split(".")[0] == "dnnc" and not module.startswith(("dnnc.ir", "dnnc.frontends", *arrays)):
                bad.append(f"{name_of(p)}:{line}: a frontend makes IR and may not import {module}")
    report(bad)


@pytest.mark.slow
def test_heavy_modules_stay_in_their_place() -> None:
    bad = []
    for p in sources():
        for line, module in imports(p):
            homes = HOMES.get(module.split(".")[0])
            if homes is not None and not name_of(p).startswith(homes):
                bad.append(f"{name_of(p)}:{line}: {module} may be imported in {', '.join(homes)} only")
    report(bad)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout


@in_a_quiet_round
def test_import_is_quick_and_lazy() -> None:
    code = "import sys, time; t = time.perf_counter(); import dnnc; print(time.perf_counter() - t, *sys.modules)"
    seconds, *modules = run_python(code).split()
    heavy = {m.split(".")[0] for m in modules} & {
        "numpy",
        "onnx",
        "llvmlite",
        "cupy",
        "typer",
        "rich",
        "ml_dtypes",
    }
    assert not heavy, f"`import dnnc` loads {heavy}"
    quiet(float(seconds) < 0.08, f"`import dnnc` takes {float(seconds) * 1e3:.0f} ms")


def test_public_names_resolve() -> None:
    import dnnc

    for name in dnnc.__all__:
        assert getattr(dnnc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        dnnc.compil  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    import dnnc

    block = next(s for s in tree_of(ROOT / "compiler/__init__.py").body if isinstance(s, ast.If))
    static = {(n.module, a.asname) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert static == {(module, name) for name, module in dnnc._NAMES.items()} | {("dnnc", m) for m in dnnc._MODULES}


# --- ops --------------------------------------------------------------------------------------------------------------


def is_op_name(n: ast.AST) -> bool:
    """`op.name` or `n.op.name`"""
    owner = n.value if isinstance(n, ast.Attribute) and n.attr == "name" else None
    return (isinstance(owner, ast.Attribute) and owner.attr == "op") or (
        isinstance(owner, ast.Name) and owner.id == "op"
    )


def asks_name(n: ast.AST) -> bool:
    """Does an expression compare the name of an op, or look at how it begins or ends?"""
    if isinstance(n, ast.Compare):
        return any(map(is_op_name, (n.left, *n.comparators)))
    return (
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr in ("startswith", "endswith")
        and is_op_name(n.func.value)
    )


@pytest.mark.slow
def test_op_knowledge_stands_in_records() -> None:
    found = [
        f"{name_of(p)}:{n.lineno}: {ast.unparse(n)}"
        for p in sources()
        if not name_of(p).startswith(RULES_BY_NAME)
        for n in nodes()[p][1]
        if asks_name(n)
    ]
    assert len(found) <= MAX_NAME_TESTS, (
        f"{len(found)} tests of an op's name, {MAX_NAME_TESTS} are allowed: let the record say what holds for the op "
        "(dnnc.ir.op), or root a rule at it (dnnc.passes.rewrite)\n" + "\n".join(found)
    )
    assert len(found) == MAX_NAME_TESTS, f"MAX_NAME_TESTS can fall to {len(found)}"


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_are_short() -> None:
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in everything()}
    report(
        [
            f"{name}: {n} lines, the limit is {MAX_LINES}; split it along what it does"
            for name, n in lengths.items()
            if n > MAX_LINES
        ]
    )


def settings() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]  # type: ignore[no-any-return]


def packages_on_disk() -> set[str]:
    """Dotted names of the folders that hold an `__init__.py`, as they are installed."""
    found = set()
    for p in sources():
        if p.name == "__init__.py":
            layer, *rest = p.parent.relative_to(ROOT).parts
            found.add(".".join(["dnnc", *([] if layer == "compiler" else [layer]), *rest]))
    return found


def test_package_list_is_complete() -> None:
    listed = settings()["packages"]
    assert isinstance(listed, list)
    assert sorted(listed) == sorted(packages_on_disk()), (
        "[tool.setuptools] packages in pyproject.toml differs from the folders"
    )


def test_every_folder_with_code_is_a_package() -> None:
    report(
        [f"{name_of(p)}: its folder has no __init__.py" for p in sources() if not (p.parent / "__init__.py").exists()]
    )


@pytest.mark.slow
def test_wheel_holds_every_file(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for layer in LAYERS:
        if (ROOT / layer).exists():
            shutil.copytree(ROOT / layer, tree / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    code = "import setuptools.build_meta as b; b.build_wheel('.')"
    built = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tree.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    want = {"dnnc/" + name_of(p).removeprefix("compiler/") for p in sources()} | {"dnnc/py.typed"}
    assert want <= inside, f"not in the wheel: {sorted(want - inside)}"
    assert any(n.endswith("licenses/LICENSE") for n in inside)


@pytest.mark.parametrize("folder", ["rewrites", "planning", "analysis"])
def test_every_pass_has_its_tests(folder: str) -> None:
    modules = [p.stem for p in sorted((ROOT / "passes" / folder).glob("*.py")) if p.stem != "__init__"]
    report(
        [
            f"passes/{folder}/{m}.py has no tests/passes/{folder}/test_{m}.py"
            for m in modules
            if not (ROOT / f"tests/passes/{folder}/test_{m}.py").exists()
        ]
    )


# --- what may not stand in the code -----------------------------------------------------------------------------------


def search(pattern: str, files: list[Path], flags: int = 0) -> list[str]:
    rule = re.compile(pattern, flags)
    return [
        f"{name_of(p)}:{k}: {line.strip()[:120]}"
        for p in files
        for k, line in enumerate(p.read_text().splitlines(), 1)
        if rule.search(line)
    ]


@pytest.mark.slow
def test_no_model_of_the_zoo_is_known_by_name() -> None:
    report(search(rf"(?<![a-z])({'|'.join(ZOO)})(?![a-z])", sources(), re.IGNORECASE))


def _is_shape(n: ast.expr | None) -> bool:
    if not isinstance(n, (ast.Tuple, ast.List)) or len(n.elts) < 3:
        return False
    values = [e.value for e in n.elts if isinstance(e, ast.Constant) and type(e.value) is int]
    return len(values) == len(n.elts) and max(values) >= 32


@pytest.mark.slow
def test_no_table_of_shapes() -> None:
    bad = []
    for p in sources():
        for n in nodes()[p][1]:
            parts = (
                [*n.keys, *n.values]
                if isinstance(n, ast.Dict)
                else n.elts
                if isinstance(n, (ast.List, ast.Tuple, ast.Set))
                else []
            )
            if sum(map(_is_shape, parts)) >= 3:
                bad.append(
                    f"{name_of(p)}:{n.lineno}: a table of literal shapes; decide by size, reuse and target instead"
                )
    report(bad)


@pytest.mark.slow
def test_no_unfinished_work() -> None:
    marks = [
        "TO" + "DO",
        "FIX" + "ME",
        "XX" + "X",
        "HA" + "CK",
        "NotImpl" + "ementedError",
        "pytest" + r"\.skip",
        "x" + "fail",
        "import" + "orskip",
    ]
    report(search(rf"\b({'|'.join(marks)})\b", everything()))


@pytest.mark.slow
def test_no_trace_of_a_machine_or_a_ticket() -> None:
    texts = [
        *everything(),
        *sorted((ROOT / "docs").rglob("*.md")),
        *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "Makefile", ".ci/run")),
    ]
    report(search(r"(^|[^\w.~])/(?:home|root|work|mnt|Users)/|\b(?:issue|ticket|PR) ?#?\d+\b", texts, re.IGNORECASE))


@pytest.mark.slow
def test_no_hidden_state() -> None:
    """No star import, no `global`, no empty container at module level but the listed caches."""
    bad = []
    for p in sources():
        body, inside = nodes()[p]
        for n in inside:
            if isinstance(n, ast.Global) or (isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names)):
                bad.append(f"{name_of(p)}:{n.lineno}: {ast.unparse(n)}")
        for s in body:
            name = _filled_later(s)
            if name and (name_of(p), name) not in MUTABLE_GLOBALS:
                bad.append(f"{name_of(p)}:{s.lineno}: {name} is filled at run time; pass such state as an argument")
    report(bad)


def _filled_later(s: ast.stmt) -> str:
    """The name of an empty container that a module-level statement makes, or an empty string."""
    v = s.value if isinstance(s, (ast.Assign, ast.AnnAssign)) else None
    call = ast.unparse(v.func) if isinstance(v, ast.Call) and not v.args else ""
    empty = (
        (isinstance(v, ast.Dict) and not v.keys)
        or (isinstance(v, ast.List) and not v.elts)
        or call in ("dict", "list", "set")
    )
    if not empty and not call.endswith(("defaultdict", "WeakValueDictionary", "threading.local", "ContextVar")):
        return ""
    target = s.targets[0] if isinstance(s, ast.Assign) else s.target if isinstance(s, ast.AnnAssign) else None
    return target.id if isinstance(target, ast.Name) else ""


@pytest.mark.slow
def test_environment_is_read_in_one_file() -> None:
    files = [p for p in sources() if name_of(p) != "compiler/options.py"]
    report(search(r"\bos\.(environ|getenv)\b|from os import .*(environ|getenv)", files))
