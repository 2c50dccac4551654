"""Hooks of the site's build (MkDocs): pages for files outside of docs/, and charts of measured results.

A page links to examples, results and other files of the repository by relative paths, so that links also work where
Markdown is read without the site. Here each such file becomes a page below `source/`, and links are rewritten.
`<!-- chart: NAME -->` becomes the chart NAME of `benchmarks/results/charts.json`, `<!-- api: PACKAGE -->` the reference
of all public names of a package, `<!-- api: PACKAGE NAMES -->` of these.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
API = re.compile(r"^<!-- api: ([\w.]+)((?: \w+)*) -->$", re.M)
CHART = re.compile(r"^<!-- chart: (\w+) -->$", re.M)
PLOTLY = "assets/plotly.min.js"
HOVER = "%{y}: %{x}<extra>%{fullData.name}</extra>"


def site_path(path: str) -> str:
    """Path in the repository -> path of its page below docs/."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def repository_path(path: str) -> str:
    """The reverse of `site_path`, for pages of this build."""
    if not path.startswith("source/"):
        return f"docs/{path}"
    path = path.removeprefix("source/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def links(path: str, text: str) -> list[str]:
    """Files of the repository outside of docs/ that a document links to; `path` is the document's own."""
    folder = posixpath.dirname(path)
    targets = (posixpath.normpath(posixpath.join(folder, m[1])) for m in LINK.finditer(FENCE.sub("", text)))
    return [t for t in targets if not t.startswith("docs/") and t != "README.md" and (ROOT / t).is_file()]


def content(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = "python" if path.endswith(".py") else "text"
    return f"# {path}\n\n````{language}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [(f"docs/{f.src_uri}", (ROOT / "docs" / f.src_uri).read_text()) for f in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        path, text = waiting.pop()
        for target in links(path, text):
            if target not in seen:
                seen.add(target)
                page = content(target)
                files.append(File.generated(config, site_path(target), content=page))
                if target.endswith(".md"):
                    waiting.append((target, page))
    return files


def rewritten(text: str, page: str) -> str:
    """A document with links to pages of the site in the place of links to files of the repository."""
    home, folder = posixpath.dirname(page), posixpath.dirname(repository_path(page))

    def link(m: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, m[1]))
        if not (ROOT / target).is_file() or not (target.startswith("docs/") or "." in target or target == "LICENSE"):
            return m[0]
        if target.startswith("docs/") and not target.endswith(".md"):
            return m[0]
        return posixpath.relpath(site_path(target), home or ".") + m[2]

    parts, at = [], 0
    for m in FENCE.finditer(text):
        parts += [LINK.sub(link, text[at : m.start()]), m[0]]
        at = m.end()
    return "".join([*parts, LINK.sub(link, text[at:])])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    charts = CHART.search(markdown)
    text = API.sub(lambda m: reference(m[1], m[2]), rewritten(markdown, page.file.src_uri))
    if not charts:
        return text
    script = posixpath.relpath(PLOTLY, posixpath.dirname(page.file.src_uri) or ".")
    text = CHART.sub(lambda m: chart(m[1]), text)
    return f'<script src="{script}"></script>\n\n{text}'


def on_post_build(config: MkDocsConfig) -> None:
    from plotly.offline import get_plotlyjs

    (Path(config.site_dir) / PLOTLY).write_text(get_plotlyjs())


# --- reference --------------------------------------------------------------------------------------------------------


def tree(module: str) -> ast.Module:
    path = ROOT / ".types" / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def exported(package: str) -> dict[str, list[str]]:
    """Public names of a package by the module that defines them: its imports of the form `X as X`."""
    folder = ROOT / ".types" / package.replace(".", "/")
    names: dict[str, list[str]] = {}
    nodes = list(ast.walk(tree(package)))
    deleted = {t.id for n in nodes if isinstance(n, ast.Delete) for t in n.targets if isinstance(t, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dnnc"):
            public = [a.name for a in node.names if a.asname == a.name and a.name not in deleted]
            modules = {n for n in public if (folder / n).is_dir() or (folder / f"{n}.py").exists()}
            names.setdefault(node.module, []).extend(n for n in public if n not in modules)
    return {module: found for module, found in names.items() if found}


def written(module: str, name: str) -> bool:
    """Does a module, or one that it imports the name from, define it by `def` or `class`?"""
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return not (isinstance(node, ast.ClassDef) and node.keywords)  # these complete it in __init_subclass__
        if isinstance(node, ast.ImportFrom) and any(name in (a.asname, a.name) for a in node.names):
            return written(str(node.module), name)
    return False


def entry(name: str) -> str:
    """The entry of a name whose signature exists only once the module is imported."""
    sys.path.insert(0, str(ROOT / ".types"))
    module, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(module), last)
    sys.path.pop(0)
    signature = re.sub(r"'([\w.| \[\],]+)'", r"\1", str(inspect.signature(thing)))
    return f"### {name} {{ #{name} }}\n\n```python\n{last}{signature}\n```\n\n{inspect.cleandoc(thing.__doc__ or '')}\n"


def reference(package: str, chosen: str) -> str:
    """The entries of these names of a package, or of all public ones, under headings by module."""
    public = exported(package)
    module_of = {name: module for module, names in public.items() for name in names}
    groups = {"": chosen.split()} if chosen else {m.rsplit(".", 1)[-1]: names for m, names in public.items()}
    text = []
    for title, names in groups.items():
        text += [f"## {title.replace('_', ' ').capitalize()}\n"] if title else []
        for name in names:
            path = f"{package}.{name}"
            is_written = written(module_of[name], name)
            text.append(f"::: {path}\n    options: {{heading_level: 3}}\n" if is_written else entry(path))
    return "\n".join(text)


# --- charts -----------------------------------------------------------------------------------------------------------


def chart(name: str) -> str:
    """One record of charts.json as HTML: horizontal bars, one row for each label, grouped by series."""
    import plotly.graph_objects as go

    records: dict[str, Any] = json.loads((ROOT / "benchmarks/results/charts.json").read_text())
    record = records[name]
    labels = list(record["rows"])[::-1]
    figure = go.Figure()
    for k, series in reversed(list(enumerate(record["series"]))):
        values = [record["rows"][label][k] for label in labels]
        figure.add_bar(y=labels, x=values, name=series, orientation="h", hovertemplate=HOVER)
    if "line" in record:
        figure.add_vline(x=record["line"], line_dash="dot", line_color="#888")
    figure.update_layout(
        barmode="group",
        height=90 + (10 + 13 * len(record["series"])) * len(labels),
        margin={"l": 10, "r": 10, "t": 30, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#888"},
        showlegend=len(record["series"]) > 1,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
        xaxis={
            "title": record["unit"],
            "side": "top" if len(labels) > 20 else "bottom",
            "gridcolor": "rgba(128,128,128,0.25)",
            "type": record.get("axis", "linear"),
        },
        yaxis={"automargin": True},
    )
    html = figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
    return f'<div class="chart">{html}</div>\n'
