"""Is what the compiler makes of some bytes right? Either an error that says what is wrong with them, or results as the
interpreter's.

A file goes in: an .onnx model or a saved model (.dnnc). It is read, compiled without the kernel check (so that a wrong
kernel shows in the results), run on random inputs, and compared with the float64 interpreter of the graph that was
read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import dnnc
from dnnc.executable import Executable
from dnnc.ir.errors import AccuracyError, DnncError, InternalError, ParseError, ScheduleError, VerifyError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import as_env, resolve
from dnnc.tools.accuracy import first_difference, random_inputs

Array = np.ndarray[Any, Any]
# Errors that say something about dnnc, not about the model.
OWN_FAULT = (AccuracyError, InternalError, ParseError, ScheduleError, VerifyError)
SIZE = 3  # of a symbolic dim, where its bounds allow it
MOST_ELEMENTS = 1 << 24  # of a value: a model with larger ones is compiled and not run
MOST_STEPS = 1 << 16  # larger numbers in a model with a loop may be its trip count: it is compiled and not run
Tell = Callable[[str], None]


def judge(path: Path, cache: Any, threads: int, sealed: bool, tell: Tell = lambda phase: None) -> str | None:
    """What is wrong with what dnnc does with a file; None when it is right.

    Args:
        path: an .onnx or .dnnc file.
        cache: folder of compiled kernels.
        threads: of a call.
        sealed: a saved model whose checksums are right though its contents were changed: its machine code is not for
            running.
        tell: told "compiled" before the model is run, and "refused" with an error that is as it should be.
    """
    try:
        f = load(path, cache, threads, sealed)
        tell("compiled")
        return run_and_compare(f, path)
    except DnncError as e:
        if isinstance(e, OWN_FAULT):
            return f"{type(e).__name__}: {e}"
        tell("refused")
        return None if str(e) else f"{type(e).__name__} without a message"
    except Exception as e:  # whatever escapes is dnnc's mistake
        return f"escaped {type(e).__name__}: {e} at {_place(e)}"


def load(path: Path, cache: Any, threads: int, sealed: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".dnnc":
            return dnnc.load(path, code=not sealed, threads=threads, cache=cache)
        return dnnc.compile(path, cache=cache, threads=threads, verify=False)


def _place(e: BaseException) -> str:
    tb = e.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return f"{Path(tb.tb_frame.f_code.co_filename).name}:{tb.tb_lineno}" if tb is not None else "?"


def run_and_compare(f: Any, path: Path) -> str | None:
    """None, or the first output that is off."""
    if f.deferred:
        return run_late(f, path)
    if not small(f.graph) or runs_long(f.graph):
        return None
    inputs = random_inputs(f.graph, sizes(f.graph), np.random.default_rng(0))
    return compare(f, f.graph, inputs)


def compare(f: Any, graph: Graph, inputs: list[Array]) -> str | None:
    with np.errstate(all="ignore"):
        got = f(*inputs)
        many = [got] if len(graph.outputs) == 1 else list(got)
        if f.options.target == "reference":
            return None
        if any(
            isinstance(x, list) or x is None for x in many
        ):  # sequences, which the interpreter of tensors does not know
            return None
        wrong = first_difference(graph, inputs, many)
    return None if wrong is None else f"wrong result: output {graph.outputs[wrong[0]].name}, {wrong[1]}"


def run_late(f: Executable, path: Path) -> str | None:
    """Models that are read at the call: inputs as the file declares them, open sizes being SIZE."""
    if path.suffix != ".onnx":
        return None
    graph = onnx.load_model_from_string(path.read_bytes()).graph
    constants = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    rng = np.random.default_rng(0)
    arrays = []
    for i in graph.input:
        if i.name in constants:
            continue
        t = i.type.tensor_type
        shape = [d.dim_value or SIZE for d in t.shape.dim]
        if (
            i.type.WhichOneof("value") != "tensor_type"
            or min(shape, default=1) < 0
            or np.prod(shape, dtype=object) > MOST_ELEMENTS
        ):
            return None
        dtype = helper.tensor_dtype_to_np_dtype(t.elem_type)
        arrays.append(
            np.asarray(
                rng.standard_normal(shape) if np.issubdtype(dtype, np.floating) else rng.integers(0, 2, shape)
            ).astype(dtype)
        )
    f(*arrays)
    inner = next(reversed(f.variants), None)  # none where there is nothing to compute
    return (
        compare(inner, inner.graph, arrays)
        if inner is not None and not inner.report.host and not runs_long(inner.graph)
        else None
    )


def sizes(graph: Graph) -> Mapping[Var, int]:
    """A size for every symbolic dim."""
    out = {}
    for v in graph.dims.values():
        lo, hi = (v.lo if isinstance(v.lo, int) else 1), (v.hi if isinstance(v.hi, int) else 1 << 30)
        n = max(lo, min(hi, SIZE))
        out[v] = -(-n // v.div) * v.div
    return out


def small(graph: Graph) -> bool:
    """Can inputs be made, and the interpreter run in the time that a mutant has?"""
    if any(v.type.dtype.kind == "s" for v in graph.inputs):
        return False
    env = as_env(sizes(graph))
    values = [*graph.inputs, *(v for n in graph.nodes() for v in n.outputs)]
    elements = [resolve(v.type, env).size for v in values]
    return all(not isinstance(n, int) or n <= MOST_ELEMENTS for n in elements)


def runs_long(graph: Graph) -> bool:
    """Has it a loop, and a number that may be how often it runs?"""
    loops = any(list(n.subgraphs()) for n in graph.nodes())
    return loops and any(
        a.dtype.kind in "iu" and a.size and int(a.max()) > MOST_STEPS for a in graph.constants.values()
    )
