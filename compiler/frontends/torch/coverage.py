"""Tables of the ATen operators for docs/pytorch.md: `python -m dnnc.frontends.torch.coverage` prints them."""

from __future__ import annotations

import torch

from dnnc.frontends.torch.decompose import for_compile
from dnnc.frontends.torch.operators import GROUPS, IGNORED, REFUSED, TABLE
from dnnc.ir.errors import count


def core() -> list[str]:
    """Names of torch's core ATen operators, those of gradients included."""
    named = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    packets = [getattr(torch.ops.aten, n) for n in sorted(named) if not n.startswith("sym_") and n[-1] != "_"]
    return [p.__name__ for p in packets if any(torch.Tag.core in getattr(p, o).tags for o in p.overloads())]


def missing() -> list[str]:
    """Core operators that dnnc does not read and torch does not decompose."""
    apart = {op.name().removeprefix("aten::").split(".")[0] for op in for_compile()}
    return [n for n in core() if n not in TABLE and n not in IGNORED and n not in apart]


def markdown() -> str:
    """The table of supported operators, and one of the core operators that are not supported."""
    known = core()
    lines = [
        f"{len(known) - len(missing())} of the {len(known)} core ATen operators are supported, and "
        f"{count(len(set(TABLE) - set(known)), 'other')}. torch decomposes hundreds more into these.",
        "",
    ]
    lines += ["| group | operators |", "|---|---|"]
    lines += [f"| {group} | {' '.join(f'`{n}`' for n in sorted(names))} |" for group, names in GROUPS.items()]
    lines += ["", "| core, not supported | reason |", "|---|---|"]
    lines += [f"| `{n}` | {REFUSED.get(n, 'not implemented yet')} |" for n in missing()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
