"""Dims that only the data tells: how a converter makes one. See `dnnc.ir.ops.host` for the ops that bind them."""

from __future__ import annotations

from dnnc.frontends.onnx.call import Call, NeedsValues
from dnnc.frontends.onnx.dim_constraints import Facts
from dnnc.ir.expr import var
from dnnc.ir.graph import identifier
from dnnc.ir.types import Dim


def fresh_dim(c: Call, high: Dim | None = None, stem: str = "") -> Dim:
    """A new symbol in [0, high]; its name is `stem`, or the node's first output, with a suffix.

    Where the model has shown that the size must be another one (it is added to a tensor of 4 elements), it is that one:
    the model is read again with every fact that it implies, and the name of the symbol is the same in all readings.
    """
    importer = c.env[0]
    if importer.by_contents:
        inputs = tuple(sorted(frozenset().union(*(i.origins for i in c.items if i is not None))))
        raise NeedsValues(
            f"the size of the result is known only when the model runs: it depends on the data of {', '.join(inputs)}",
            inputs,
        )
    name = identifier(stem or next((o for o in c.outputs if o), c.op)) + "_size"
    number = importer.fresh[name] = importer.fresh.get(name, -1) + 1
    unique = f"{name}{number}" if number else name
    facts: Facts = importer.facts
    if unique in facts.equal:
        return facts.symbol(unique)
    low, noted = facts.bounds.get(unique, (0, None))
    if noted is not None and (high is None or (isinstance(high, int) and noted < high)):
        high = noted
    return low if low == high else var(unique, lo=low, hi=high)
