"""Where in the user's code an fx node comes from."""

from __future__ import annotations

import re

from torch import fx

from dnnc.ir.errors import DnncError, Loc

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+([^\n]+))?')


def source_of(node: fx.Node) -> tuple[Loc, ...]:
    """The innermost line of the user's code, as the graph keeps it: the last frame outside of torch, else the last."""
    frames = FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    if not own:
        return ()
    file, line, _, _ = own[-1]
    return (Loc(node.name, file=file, line=int(line)),)


def located(e: DnncError, node: fx.Node) -> None:
    """Let an error say which line of the user's code it is about."""
    locs = source_of(node)
    if not locs or not e.args or not isinstance(e.args[0], str) or str(locs[0]) in e.args[0]:
        return
    frames = FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    code = next(
        (f[3].strip() for f in reversed(frames) if f[0] == locs[0].file and int(f[1]) == locs[0].line and f[3]), ""
    )
    e.args = (f"{locs[0]}: {e.args[0]}" + (f"\n    {code}" if code else ""), *e.args[1:])
