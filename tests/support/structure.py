"""The structure of the package in counts: who imports whom, where programs are told apart, what is built in one place.

    PYTHONPATH=tests python -m support.structure

prints each count beside the most that is allowed, and where the things counted stand if there are too many.
`tests/test_structure.py` holds the package to them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("ir", "passes", "backends", "autotune", "compiler")  # each may import those to its left
# Where an op is known by its name: its record, what imports it, and rules that are rooted at it.
RULES_BY_NAME = ("ir/ops/", "compiler/frontends/", "passes/rewrites/idioms.py", "passes/rewrite.py")


@dataclass(frozen=True)
class Import:
    """`import module`, or `from module import ...`, at a line; `local` inside a function, `typed` for type checkers."""

    line: int
    module: str
    local: bool
    typed: bool


class Structure:
    """The parsed package below a folder."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        files = [p for layer in LAYERS for p in sorted((root / layer).rglob("*.py"))]
        self.files = {p.relative_to(root).as_posix(): p for p in files}
        self.modules = {_dotted(name): name for name in self.files}

    @cached_property
    def texts(self) -> dict[str, str]:
        return {name: p.read_text() for name, p in self.files.items()}

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(text, name) for name, text in self.texts.items()}

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        return {name: list(ast.walk(tree)) for name, tree in self.trees.items()}

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {name: list(self._imports(tree, False, False)) for name, tree in self.trees.items()}

    def _imports(self, n: ast.AST, local: bool, typed: bool) -> Iterator[Import]:
        for c in ast.iter_child_nodes(n):
            if isinstance(c, ast.Import):
                yield from (Import(c.lineno, a.name, local, typed) for a in c.names)
            elif isinstance(c, ast.ImportFrom):
                for full in (f"{c.module}.{a.name}" for a in c.names):
                    yield Import(c.lineno, full if full in self.modules else str(c.module), local, typed)
            else:
                inside = isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                checked = isinstance(c, ast.If) and "TYPE_CHECKING" in ast.unparse(c.test)
                yield from self._imports(c, local or inside, typed or checked)

    # --- what is counted: where each thing stands ---------------------------------------------------------------------

    def executables(self) -> list[str]:
        """Classes that users call with arrays and ask what was compiled: `__call__` and `report`."""
        found = []
        for name, nodes in self.nodes.items():
            for c in nodes if name.startswith(("backends/", "compiler/")) else []:
                if isinstance(c, ast.ClassDef):
                    members = {x.name for x in c.body if isinstance(x, ast.FunctionDef)}
                    if {"__call__", "report"} <= members | _attributes(c):
                        found.append(f"{name}:{c.lineno}: {c.name}")
        return found

    def told_apart(self) -> list[str]:
        """`isinstance` that asks which kind of executable something is."""
        return self._calls("isinstance", lambda c: any(_name(k) == "Executable" for k in _kinds(c)))

    def contexts(self) -> list[str]:
        """Places that build a PassContext."""
        return self._calls("PassContext", lambda c: True)

    def backend_imports(self) -> list[str]:
        """Imports of a backend by modules outside of backends/."""
        return [
            f"{name}:{i.line}: {i.module}"
            for name, found in self.imports.items()
            for i in found
            if not name.startswith("backends/") and i.module.startswith(("dnnc.backends.llvm", "dnnc.backends.cuda"))
        ]

    def local_imports(self) -> list[str]:
        """Import statements inside functions."""
        lines = {(name, i.line) for name, found in self.imports.items() for i in found if i.local}
        return [f"{name}:{line}: {self._line(name, line)}" for name, line in sorted(lines)]

    def unexplained_imports(self) -> list[str]:
        """Imports of dnnc's own modules inside functions that do not say why they stand there."""
        return [
            found
            for found in self.local_imports()
            if ("from dnnc" in found or "import dnnc" in found) and "#" not in found.split(":", 2)[2]
        ]

    def circles(self) -> list[str]:
        """A circle of imports; those inside functions count, those for type checkers do not."""
        graph: dict[str, set[str]] = defaultdict(set)
        for module, name in self.modules.items():
            graph[module] = {i.module for i in self.imports[name] if i.module in self.modules and not i.typed}
            graph[module].discard(module)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as e:
            return [" -> ".join(e.args[1])]
        return []

    def op_names(self) -> list[str]:
        """Comparisons of an op's name outside of op records, frontends and rules that are rooted at an op."""
        return [
            f"{name}:{n.lineno}: {ast.unparse(n)}"
            for name, nodes in self.nodes.items()
            if not name.startswith(RULES_BY_NAME)
            for n in nodes
            if isinstance(n, (ast.Compare, ast.Call)) and asks_name(n)
        ]

    def lines(self) -> int:
        return sum(text.count("\n") for text in self.texts.values())

    def _calls(self, function: str, wanted: Callable[[ast.Call], bool]) -> list[str]:
        return [
            f"{name}:{n.lineno}: {ast.unparse(n)}"
            for name, nodes in self.nodes.items()
            for n in nodes
            if isinstance(n, ast.Call) and _name(n.func) == function and wanted(n)
        ]

    def _line(self, name: str, line: int) -> str:
        return self.texts[name].splitlines()[line - 1].strip()


def _dotted(name: str) -> str:
    """`passes/rewrites/dce.py` -> `dnnc.passes.rewrites.dce`"""
    return ("dnnc/" + name.removeprefix("compiler/")).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _name(n: ast.AST) -> str:
    return n.id if isinstance(n, ast.Name) else n.attr if isinstance(n, ast.Attribute) else ""


def _kinds(c: ast.Call) -> list[ast.expr]:
    kinds = c.args[1] if len(c.args) == 2 else ast.Tuple([])
    return kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]


def _attributes(c: ast.ClassDef) -> set[str]:
    """Attributes that a class declares, or that its methods set."""
    declared = {_name(s.target) for s in c.body if isinstance(s, ast.AnnAssign)}
    stored = (n for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return declared | {n.attr for n in stored if _name(n.value) == "self"}


def is_op_name(n: ast.AST) -> bool:
    """`op.name` or `n.op.name`"""
    return isinstance(n, ast.Attribute) and n.attr == "name" and _name(n.value) == "op"


def asks_name(n: ast.AST) -> bool:
    """Does an expression compare the name of an op, or look at how it begins or ends?"""
    if isinstance(n, ast.Compare):
        return any(map(is_op_name, (n.left, *n.comparators)))
    asked = isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("startswith", "endswith")
    return asked and is_op_name(n.func.value)


@dataclass(frozen=True)
class Count:
    """A count, the most that is allowed, and where the things counted stand."""

    title: str
    count: int
    most: int
    places: list[str]


def counts(s: Structure) -> list[Count]:
    found = [
        ("classes that execute a model", 1, s.executables()),
        ("isinstance on executables", 0, s.told_apart()),
        ("places that build a PassContext", 1, s.contexts()),
        ("imports of a backend outside of backends/", 0, s.backend_imports()),
        ("imports inside functions", 62, s.local_imports()),
        ("of dnnc's modules, without a reason beside them", 0, s.unexplained_imports()),
        ("import circles", 0, s.circles()),
        ("comparisons of an op's name", 22, s.op_names()),
    ]
    return [Count(title, len(p), most, p) for title, most, p in found]


def main() -> None:
    package = Structure()
    print(f"{'lines of Python':50} {package.lines():7,}")
    for c in counts(package):
        print(f"{c.title:50} {c.count:7,}   at most {c.most:,}")
        if c.count > c.most:
            print("\n".join(f"    {p}" for p in c.places))


if __name__ == "__main__":
    main()
