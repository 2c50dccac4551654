"""`dnnc targets`, `dnnc cache`, `dnnc ops`: what there is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from dnnc.backends.registry import availability, names
from dnnc.backends.runtime.kernel_cache import KernelCache, unwritable
from dnnc.cli.arguments import parse_cache
from dnnc.cli.console import show_json, show_tables
from dnnc.ir.errors import count
from dnnc.ir.ops import FAMILIES
from dnnc.options import cache_folder
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes


def targets_command(as_json: bool) -> None:
    """What this machine can compile for, and why not for the others."""
    found = [availability(name) for name in names()]
    if as_json:
        show_json(found)
        return
    tables = []
    for t in found:
        details = [(k, _detail(k, v)) for k, v in t.items() if k not in ("name", "available", "reason")]
        title = f"{t['name']}: {'available' if t['available'] else 'not available'}"
        rows = [*([("because", t["reason"])] if t["reason"] else []), *details]
        tables.append(Table(title, ("", ""), tuple(rows), prose=True))
    show_tables(tables)


def _detail(name: str, v: Any) -> str:
    if isinstance(v, list):
        return " ".join(map(str, v))
    return show_bytes(v) if name in ("l1", "l2") else str(v)


def cache_info_command(cache: str, as_json: bool) -> None:
    """Where compiled kernels and what is known of them are kept, and how many entries that makes."""
    folder = cache_folder(parse_cache(cache))
    info = KernelCache(folder).info()
    reason = info.reason or (unwritable(folder) if folder is not None else "")
    if as_json:
        data = {
            "path": str(folder) if folder else None,
            "entries": info.entries,
            "bytes": info.bytes,
            "limit_bytes": info.limit_bytes,
        }
        show_json({**data, "usable": not reason, "reason": reason})
        return
    rows = [
        ("entries", str(info.entries)),
        ("size", f"{show_bytes(info.bytes)} of at most {show_bytes(info.limit_bytes)}"),
    ]
    if reason:
        rows.append(("not usable", reason))
    show_tables([Table(f"cache {folder or ''}", ("", ""), tuple(rows), prose=True)])


def cache_clear_command(cache: str, as_json: bool) -> None:
    """Remove every compiled kernel, and what is known of it."""
    folder = cache_folder(parse_cache(cache))
    removed = KernelCache(folder).clear()
    if as_json:
        show_json({"path": str(folder) if folder else None, "removed": removed})
    else:
        typer.echo(f"removed {count(removed, 'entry', 'entries')} from {folder}")


def ops_command(onnx: bool, as_json: bool, as_markdown: bool = False) -> None:
    """The ops of the graph IR, or the ONNX operators and how each is read."""
    if onnx or as_markdown:
        _show_coverage(as_json, as_markdown)
        return
    ops = [(family, op.name, _kind(op)) for family, members in FAMILIES.items() for op in members]
    if as_json:
        show_json([{"family": f, "name": n, "kind": k} for f, n, k in ops])
    else:
        show_tables([Table(f"{count(len(ops), 'op')}", ("family", "op", "defined by"), tuple(ops))])


def _kind(op: Any) -> str:
    return (
        "a tensor expression"
        if op.compute is not None
        else "other ops"
        if op.decompose is not None
        else "Python on the host"
    )


def _show_coverage(as_json: bool, as_markdown: bool) -> None:
    from dnnc.cli.coverage import COLUMNS, cells, coverage, markdown  # loads onnx, which nothing else here needs

    found = coverage()
    if as_markdown:
        typer.echo(markdown(found), nl=False)
        return
    if as_json:
        show_json([asdict(o) for o in found])
        return
    tables = []
    for domain in dict.fromkeys(o.domain for o in found):
        rows = [o for o in found if o.domain == domain]
        title = f"{domain or 'ai.onnx'}: {sum(bool(o.how) for o in rows)} of {count(len(rows), 'operator')}"
        tables.append(Table(title, COLUMNS, tuple(cells(o) for o in rows)))
    show_tables(tables)
