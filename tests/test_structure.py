"""The counts of `support.structure`, and that they see what they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.structure import LAYERS, Count, Structure, counts

PLANTED = {
    "ir/a.py": "from dnnc.passes import b\n",
    "passes/b.py": "def f():\n    from dnnc.ir.a import x\n    import torch\n    return x\n",
    "backends/llvm/c.py": "class Program:\n    report: int\n    def __call__(self): ...\n",
    "autotune/d.py": "from dnnc.backends.llvm import c\nimport dnnc.passes.base as base\np = base.PassContext(1)\n",
    "compiler/e.py": "def f(n, x):\n    return n.op.name in ('a', 'b') or isinstance(x, (int, Executable))\n",
}


@pytest.fixture(scope="module")
def package() -> list[Count]:
    return counts(Structure())


@pytest.mark.slow
def test_counts_of_the_package(package: list[Count]) -> None:
    over = [c for c in package if c.count > c.most]
    assert not over, "\n".join(f"{c.title}: {c.count}, at most {c.most}\n  " + "\n  ".join(c.places) for c in over)


@pytest.mark.slow
def test_allowances_fall_with_the_counts(package: list[Count]) -> None:
    loose = [c for c in package if c.places and c.count < c.most and c.title != "imports inside functions"]
    assert not loose, [f"{c.title}: {c.most} can fall to {c.count}" for c in loose]


def test_counts_see_what_they_count(tmp_path: Path) -> None:
    for layer in LAYERS:
        (tmp_path / layer).mkdir()
    for name, text in PLANTED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    s = Structure(tmp_path)
    assert s.executables() == ["backends/llvm/c.py:1: Program"]
    assert [p.split(":")[0] for p in s.told_apart()] == ["compiler/e.py"]
    assert [p.split(":")[0] for p in s.contexts()] == ["autotune/d.py"]
    assert s.backend_imports() == ["autotune/d.py:1: dnnc.backends.llvm.c"]
    assert len(s.local_imports()) == 2 and s.unexplained_imports() == ["passes/b.py:2: from dnnc.ir.a import x"]
    assert s.circles() and "dnnc.ir.a" in s.circles()[0]
    assert s.op_names() == ["compiler/e.py:2: n.op.name in ('a', 'b')"]
    assert s.lines() == sum(text.count("\n") for text in PLANTED.values())
