"""Array code as graphs. In: a Python function of `dnnc.array`. Out: a graph of what it computes.

Tracing is running: Python's own control flow, function calls and containers are gone afterwards. `dnnc.pytree` knows
nested arguments and results, `tracer.py` runs the function, `regions.py` makes graphs of what it did, `control.py` has
loops and branches that stay in the graph, `vmap.py` computes what a function made of one example on many
(`batching.py`, by the rules in `dnnc.ir.batching` and `batch_control.py`).
"""

from dnnc.frontends.trace.control import cond, scan, while_loop
from dnnc.frontends.trace.spec import Spec
from dnnc.frontends.trace.tracer import Traced, is_traced, spec_of, trace, traced, tracing
from dnnc.frontends.trace.vmap import vmap

__all__ = ["Spec", "Traced", "cond", "is_traced", "scan", "spec_of", "trace", "traced", "tracing", "vmap", "while_loop"]
