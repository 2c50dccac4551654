"""A view as a page: data and texts are compressed within it, and unpacked by the browser."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html as markup
import json
from importlib.resources import files

from dnnc.view.collect import View

SCRIPTS = ("data.js", "graph.js", "details.js", "charts.js", "main.js")
TEXTS = 1_500_000  # characters of compressed texts of kernels in a page; the longest others are left out


def html(view: View) -> str:
    """The page. It loads nothing, and its policy forbids it."""
    view, texts = _within(view)
    data = {f.name: getattr(view, f.name) for f in dataclasses.fields(view) if f.name != "texts"}
    assets, vendor = files("dnnc.view") / "assets", files("dnnc.view") / "vendor"
    parts = {
        "title": markup.escape(view.title),
        "style": (assets / "view.css").read_text(encoding="utf-8"),
        "data": _packed(json.dumps(data, separators=(",", ":"))),
        "texts": "\n".join(texts),
        "cytoscape": (vendor / "cytoscape.min.js").read_text(encoding="utf-8"),
        "dagre": (vendor / "dagre.min.js").read_text(encoding="utf-8").replace("//# sourceMappingURL", "// source map"),
        "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    first, *rest = (assets / "view.html").read_text(encoding="utf-8").split("{{")
    out = [first]
    for part in rest:
        name, _, after = part.partition("}}")
        out += [parts[name], after]
    return "".join(out)


def _packed(text: str) -> str:
    """gzip in base64; the same text gives the same characters."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _within(view: View) -> tuple[View, list[str]]:
    """The view and its packed texts, without the longest ones where they are too many for a page."""
    packed = [_packed(t) for t in view.texts]
    left, kept = TEXTS, {}
    for k in sorted(range(len(packed)), key=lambda k: len(packed[k])):
        left -= len(packed[k])
        if left < 0:
            break
        kept[k] = 0
    number = {k: j for j, k in enumerate(sorted(kept))}
    stages = ("naive", "operator", *view.stages)
    kernels = [{n: number.get(v, -1) if n in stages else v for n, v in k.items()} for k in view.kernels]
    return dataclasses.replace(view, kernels=kernels), [packed[k] for k in sorted(kept)]
