"""The documents: Python blocks run from anywhere, commands parse and the quick ones run, links resolve."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import dnnc
from dnnc.cli.app import app
from dnnc.cli.coverage import coverage
from dnnc.frontends.torch.operators import TABLE
from dnnc.options import CompileOptions
from support.cli import commands

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEVICE = re.compile(r'--target "?cuda\b(?! -arch)|--runner ray|--input image=random')  # needs a GPU or a cluster


def blocks(text: str) -> list[tuple[int, str]]:
    """(line of its first statement, code) of every block that is marked `python`."""
    return [
        (text.count("\n", 0, m.start(1)) + 1, m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    ]


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.stem)
def test_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All blocks of a document in order, in one namespace and a fresh folder, from a file of another name."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    code = ""
    for line, block in blocks(path.read_text()):
        code += "\n" * (line - 1 - code.count("\n")) + block  # errors tell the line of the document
    script = tmp_path / "pasted.py"
    script.write_text(code)
    namespace: dict[str, Any] = {"__name__": "__pasted__", "__file__": str(script)}
    exec(compile(code, str(script), "exec"), namespace)


def test_links_lead_somewhere() -> None:
    bad = []
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", prose):
            if "://" not in target and not (path.parent / target).exists():
                bad.append(f"{path.name}: {target}")
    assert not bad


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site names them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    words = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", h).lower() for h in re.findall(r"^#+ (.+)$", prose, re.M))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", w).strip()) for w in words}


def test_links_lead_to_headings() -> None:
    bad = []
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md|)#([^)\s]+)\)", prose):
            page = path.parent / target if target else path
            if page.exists() and "api" not in page.parts and anchor not in anchors(page.read_text()):
                bad.append(f"{path.name}: {target}#{anchor}")
    assert not bad


def test_the_site_has_every_page() -> None:
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in DOCUMENTS[1:]}
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(pages)


def test_the_reference_has_every_public_name() -> None:
    """Pages of other packages take all names from their source; this one groups them by topic."""
    text = (ROOT / "docs/api/dnnc.md").read_text()
    listed = [n for names in re.findall(r"<!-- api: dnnc ([\w ]+) -->", text) for n in names.split()]
    modules = {"array", "ir", "nn", "optim", "random"}
    assert sorted([*listed, "Executable", "__version__", *modules]) == sorted(dnnc.__all__)


def test_charts_draw_measured_numbers() -> None:
    """Every number of a chart stands in the row of its label, on the page that the chart names."""
    folder = ROOT / "benchmarks/results"
    charts = json.loads((folder / "charts.json").read_text())
    assert set(charts) == set(re.findall(r"<!-- chart: (\w+) -->", (ROOT / "docs/results.md").read_text()))
    for name, chart in charts.items():
        rows = [line.replace("\\|", "|") for line in (folder / chart["source"]).read_text().splitlines()]
        for label, values in chart["rows"].items():
            assert len(values) == len(chart["series"])
            cells = [
                re.findall(r"\d+\.?\d*", row.removeprefix(f"| {label} |")) for row in rows if f"| {label} |" in row
            ]
            shown = {float(v) for v in values if v is not None}
            assert any(shown <= {float(c) for c in row} for row in cells), f"{name}: {label}"


def walk() -> ModuleType:
    """The program of `make walk`."""
    spec = importlib.util.spec_from_file_location("walk", ROOT / "docs/_site/walk.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings"):

    @pytest.mark.slow
    def test_the_site_builds(tmp_path: Path) -> None:
        """Without a warning: links, anchors and references resolve; the search finds its words."""
        build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "dnnc.array.acos" in (tmp_path / "api/array.html").read_text()
        pages, problems = walk().read(tmp_path)
        assert len(pages) > 90 and not problems and not walk().unfound(tmp_path)

    @pytest.mark.slow
    @pytest.mark.thorough
    def test_a_browser_walks_the_site(tmp_path: Path) -> None:
        """`make walk`: no error in the console, no dead link, and the search finds its words."""
        build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
        for command in (build, [sys.executable, "docs/_site/walk.py", str(tmp_path)]):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stdout + done.stderr


GOOD = '<h1 id="top">A</h1><a href="b.html#part">b</a><a href="#top">up</a><a href="https://x.org">x</a>'


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("", ""),
        ('<a href="c.html">', "dead link: c.html"),
        ('<a href="sub/../b.html#parts">', "no such heading: sub/../b.html#parts"),
        ('<a href="#bottom">', "no such heading: #bottom"),
        ('<img src="pictures/missing.png">', "dead link: pictures/missing.png"),
        ('<script src="https://x.org/y.js"></script>', "loads https://x.org/y.js"),
        ('<link rel="stylesheet" href="//x.org/y.css">', "loads //x.org/y.css"),
    ],
)
def test_the_walk_finds_a_bad_link(more: str, problem: str, tmp_path: Path) -> None:
    """No browser is needed for links, and none for the words of the search."""
    (tmp_path / "search").mkdir()
    (tmp_path / "a.html").write_text(GOOD + more)
    (tmp_path / "b.html").write_text('<h2 id="part">B</h2><a href=".">home</a>')
    (tmp_path / "index.html").write_text('<a href="a.html">a</a>')
    words = [w for w in walk().WORDS if w != "tune"]
    index = {"docs": [{"title": words[0], "text": " ".join(words[1:])}]}
    (tmp_path / "search/search_index.json").write_text(json.dumps(index))
    assert walk().read(tmp_path)[1] == ([f"a.html: {problem}"] if problem else [])
    assert walk().unfound(tmp_path) == ["tune"]
    done = subprocess.run(
        [sys.executable, "docs/_site/walk.py", str(tmp_path), "--no-browser"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "search: nothing holds tune" in done.stdout and problem in done.stdout


def test_the_search_has_the_words_of_the_walk() -> None:
    """Thirty words, each on some page: the index of the search is made of them."""
    text = " ".join(p.read_text().lower() for p in DOCUMENTS)
    assert len(walk().WORDS) >= 30 and not [w for w in walk().WORDS if w.lower() not in text]
    assert len(walk().SHOWN) == 10 and all((ROOT / f"docs/{n}.md").exists() for n in walk().SHOWN)


@pytest.mark.parametrize(
    "page, names",
    [
        ("options", [f.name for f in dataclasses.fields(CompileOptions)]),
        ("operators", sorted({o.name for o in coverage()})),
        ("pytorch", sorted(TABLE)),
    ],
)
def test_pages_name_all_that_there_is(page: str, names: list[str]) -> None:
    """A user finds every option and every operator that is read; `make pages` writes the tables."""
    words = set(re.findall(r"[\w:]+", (ROOT / f"docs/{page}.md").read_text()))
    assert not set(names) - words


# --- commands ---------------------------------------------------------------------------------------------------------


def shell_lines(path: Path) -> list[str]:
    """The commands in the blocks of a document that are marked as no language, or as `sh`."""
    lines: list[str] = []
    language: str | None = None  # of the block that a line is in; None outside
    for line in map(str.strip, path.read_text().splitlines()):
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language in ("", "sh") and line and not line.startswith("#"):
            lines.append(line)
    return lines


def dnnc_lines() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every `dnnc` command in a block."""
    for path in DOCUMENTS:
        for line in shell_lines(path):
            if not re.match(r"([A-Z_]+=\S+ )*dnnc ", line):
                continue
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words and words[0] == "dnnc":
                yield path.name, words[1:]


def test_there_are_commands() -> None:
    assert len(list(dnnc_lines())) >= 25


def parsed(words: list[str]) -> None:
    """Parse a command line, without running it."""
    command: Any = commands(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("dnnc", list(words))


@pytest.mark.parametrize("words", [w for _, w in dnnc_lines()], ids=lambda w: " ".join(w)[:60])
def test_commands_parse(words: list[str]) -> None:
    try:
        parsed([w for w in words[: words.index(">")]] if ">" in words else words)
    except (typer.Exit, SystemExit) as e:  # --help
        assert getattr(e, "exit_code", getattr(e, "code", 1)) == 0
    assert "model.onnx" not in words, "use examples/digits.onnx, which everybody has"


def test_blocks_say_what_they_hold() -> None:
    """Of another language, commands and code would not be run by the tests of this file."""
    for path in DOCUMENTS:
        opened = re.findall(r"^( *)```(.*)$", path.read_text(), re.M)[::2]
        wrong = [f for f in opened if f[0] or f[1] not in ("", "sh", "python", "text", "toml")]
        assert not wrong, f"{path.name}: {wrong}"


def test_programs_in_commands_exist() -> None:
    """Those that take hours are not run here."""
    for path in DOCUMENTS:
        for line in shell_lines(path):
            if m := re.match(r"python (-m )?([\w./]+)", line):
                name = m[2].replace(".", "/") if m[1] else m[2]
                own = name.split("/")[0] in ("benchmarks", "examples")
                places = [ROOT / name, ROOT / f"{name}.py"]
                assert not own or any(p.exists() for p in places), f"{path.name}: {line}"


def runnable(page: Path) -> list[str]:
    """The commands of a page that are quick and need no device."""
    found = [n for n in shell_lines(page) if re.match(r"(dnnc|python -[cm]|printf) ", n)]
    return [n for n in found if not DEVICE.search(n) and not re.match(r"python -m (benchmarks|venv)", n)]


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in DOCUMENTS if runnable(p)], ids=lambda p: p.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """The commands of a page, in order, as a shell runs them; searches and benchmarks take less time here."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for line in runnable(page):
        quick = re.sub(r"--budget \S+", "--budget 2s", re.sub(r"--duration \S+", "--duration 0.1", line)).replace(
            "onnxruntime,openvino", "onnxruntime"
        )
        quick = (
            re.sub(r"^dnnc bench", "dnnc bench --warmup 0 --duration 0.1", quick)
            if "--duration" not in quick
            else quick
        )
        command = re.sub(r"^(dnnc|python)", lambda m: f"{sys.executable}{' -m dnnc' if m[1] == 'dnnc' else ''}", quick)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


# --- installation -----------------------------------------------------------------------------------------------------


def test_no_text_installs_from_a_package_index() -> None:
    """dnnc is on no package index: whoever typed such a command would get what somebody else has put there."""
    places = [
        p
        for d in ("compiler", "ir", "passes", "backends", "autotune", "examples", "benchmarks", "docs")
        for p in (ROOT / d).rglob("*")
    ]
    texts = [
        p
        for p in [*places, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
        if p.suffix in (".py", ".md", ".j2", "") and p.is_file()
    ]
    wrong = re.compile(r"pip install (?:-U |--upgrade )?(?:[\w.=>-]+ )*['\"]?dnnc\b(?!/)")
    assert not [
        f"{p.name}: {m[0]}"
        for p in texts
        if "__pycache__" not in p.parts
        for m in wrong.finditer(p.read_text(errors="ignore"))
    ]


def test_extras_that_are_named_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    texts = [
        *DOCUMENTS,
        *(p for d in ("compiler", "ir", "backends", "autotune", "examples") for p in (ROOT / d).rglob("*.py")),
    ]
    named = {m for p in texts for m in re.findall(r"'\.\[(\w+)\]'|install\(['\"](\w+)['\"]", p.read_text())}
    assert {x for pair in named for x in pair if x} - {"extra"} <= extras and len(named) >= 7
    table = (ROOT / "README.md").read_text()
    assert not [x for x in extras - {"dev"} if f"`{x}`" not in table]


def test_version_and_extras_of_the_packaging_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert project["authors"] and project["license"] and project["keywords"] and project["readme"] == "README.md"
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.", c)]
    assert pythons == [f"3.{k}" for k in range(10, 10 + len(pythons))] and project["requires-python"] == ">=3.10"
    docker = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=(\S+)$", docker, re.M)[1] in pythons  # type: ignore[index]
    assert set(re.findall(r"\[(\w+)\]", docker)) <= set(project["optional-dependencies"])
    assert re.findall(r"^FROM \S+ AS (\w+)$", docker, re.M) == ["wheel", "base", "cpu", "cuda"]
    assert f"## {project['version']}\n" in (ROOT / "docs/changelog.md").read_text()
