"""A model run node by node with ONNX Runtime, so that every intermediate array can be looked at, or changed.

In: a model with its weights, inputs, and a function that sees every node with its operands and results. Two such
functions are here: one counts the work, one brings the weights of a seeded model to the scale at which its activations
have the size of the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from zoo.seeded import fill, mark, recipe_of, scaled

Array = np.ndarray[Any, Any]
Operands = Sequence[Any]
Visit = Callable[[NodeProto, Operands, list[Any]], list[Any]]
WEIGHTED = {
    "Conv": 2,
    "ConvTranspose": 2,
    "Gemm": 2,
    "MatMul": None,
}  # linear in operand 1, with the bias at this place
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1, "DynamicQuantizeLSTM": 4}


class Walker:
    """Runs a model's graph; branches and loop bodies are walked too, other nodes with subgraphs run whole."""

    def __init__(self, model: ModelProto, visit: Visit) -> None:
        self._model, self._visit = model, visit
        self._sessions: dict[Any, ort.InferenceSession] = {}
        self._options = ort.SessionOptions()
        self._options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._options.log_severity_level = 4
        self._options.intra_op_num_threads = 1

    def run(self, inputs: Mapping[str, Array]) -> list[Any]:
        return self._graph(self._model.graph, dict(inputs))

    def _graph(self, g: GraphProto, values: dict[str, Any]) -> list[Any]:
        """The graph's outputs. `values` are those of the scopes around it and its inputs."""
        values = {**values, **{t.name: numpy_helper.to_array(t) for t in g.initializer}}
        for n in g.node:
            operands = [values[i] if i else None for i in n.input]
            results = self._visit(n, operands, self._node(n, operands, values))
            values.update((o, r) for o, r in zip(n.output, results) if o)
        return [values[o.name] for o in g.output]

    def _node(self, n: NodeProto, operands: Operands, values: dict[str, Any]) -> list[Any]:
        graphs = {a.name: a.g for a in n.attribute if a.type == AttributeProto.GRAPH}
        if n.op_type == "If":
            return self._graph(graphs["then_branch" if operands[0].item() else "else_branch"], values)
        if n.op_type == "Loop":
            return self._loop(graphs["body"], operands, values)
        return self._run(n, operands, values if graphs else {})

    def _loop(self, body: GraphProto, operands: Operands, values: dict[str, Any]) -> list[Any]:
        trips = None if operands[0] is None else operands[0].item()
        going = operands[1] is None or bool(operands[1].item())
        state, rows, k = list(operands[2:]), [], 0
        while going and (trips is None or k < trips):
            given = [np.asarray(k, np.int64), np.asarray(going), *state]
            out = self._graph(body, {**values, **dict(zip([i.name for i in body.input], given))})
            going, state, k = bool(out[0].item()), out[1 : 1 + len(state)], k + 1
            rows.append(out[1 + len(state) :])
        return [*state, *(np.stack(column) for column in zip(*rows))]

    def _run(self, n: NodeProto, operands: Operands, scope: Mapping[str, Any]) -> list[Any]:
        given = {i: a for i, a in zip(n.input, operands) if i}
        given.update((k, a) for k, a in scope.items() if k in _names_read(n))
        key = (n.SerializeToString(), tuple((a.dtype.str, a.shape) for a in given.values()))
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = self._session(n, given)
        made = dict(zip([o for o in n.output if o], session.run(None, given)))
        return [made.get(o) for o in n.output]

    def _session(self, n: NodeProto, given: Mapping[str, Array]) -> ort.InferenceSession:
        inputs = [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for k, a in given.items()
        ]
        graph = helper.make_graph([n], "node", inputs, [onnx.ValueInfoProto(name=o) for o in n.output if o])
        m = self._model
        one = helper.make_model(
            graph, opset_imports=m.opset_import, ir_version=max(m.ir_version, 4), functions=m.functions
        )
        return ort.InferenceSession(one.SerializeToString(), self._options, providers=["CPUExecutionProvider"])


def _names_read(n: NodeProto) -> set[str]:
    graphs = [a.g for a in n.attribute if a.type == AttributeProto.GRAPH]
    return {*n.input, *(name for g in graphs for m in g.node for name in _names_read(m))}


# --- counting ---------------------------------------------------------------------------------------------------------


def count_flops(model: ModelProto, inputs: Mapping[str, Array]) -> tuple[int, list[Any]]:
    """(2 x multiplications of convolutions, matrix products and recurrent layers, outputs of the model)."""
    total = 0

    def count(n: NodeProto, operands: Operands, results: list[Any]) -> list[Any]:
        nonlocal total
        total += node_flops(n, operands, results)
        return results

    outputs = Walker(model, count).run(inputs)
    return total, outputs


def node_flops(n: NodeProto, x: Operands, y: Operands) -> int:
    """The work of one node by the shapes of its operands and results; 0 for all but the heavy operators."""
    op = n.op_type
    if op in ("Conv", "ConvInteger"):
        return 2 * y[0].size * x[1][0].size
    if op == "QLinearConv":
        return 2 * y[0].size * x[3][0].size
    if op == "ConvTranspose":
        return 2 * x[0].size * x[1][0].size
    if op in ("MatMul", "MatMulInteger", "QLinearMatMul"):
        return 2 * y[0].size * x[0].shape[-1]
    if op in ("Gemm", "QGemm"):
        transposed = any(a.name == "transA" and a.i for a in n.attribute)
        return 2 * y[0].size * x[0].shape[0 if transposed else 1]
    if op in GATES:
        steps, batch, width = x[0].shape
        hidden = next(a.i for a in n.attribute if a.name == "hidden_size")
        return 2 * steps * batch * x[1].shape[0] * GATES[op] * hidden * (width + hidden)
    return 0


# --- scales of seeded weights -----------------------------------------------------------------------------------------


def calibrate(original: ModelProto, seeded: ModelProto, inputs: Mapping[str, Array]) -> ModelProto:
    """The seeded model with its recipes scaled such that every convolution and matrix product gives the root mean
    square that it has in the original.

    Trained weights fit the statistics that a network keeps of them (biases that batch norms were folded into); random
    ones do not, and a deep network would blow up.
    """
    sizes: list[float] = []

    def note(n: NodeProto, operands: Operands, results: list[Any]) -> list[Any]:
        if n.op_type in WEIGHTED:
            sizes.append(_square(results[0]))
        return results

    Walker(original, note).run(inputs)
    filled = ModelProto()
    filled.CopyFrom(seeded)
    fill(filled)
    wanted, factors = iter(sizes), dict[str, float]()
    names = _random_constants(seeded)

    def adjust(n: NodeProto, operands: Operands, results: list[Any]) -> list[Any]:
        if n.op_type not in WEIGHTED:
            return results
        square, weight = next(wanted, 0.0), n.input[1]
        if weight not in names or weight in factors:
            return [_rescaled(n, operands, results[0], factors.get(weight, 1.0))]
        at = WEIGHTED[n.op_type]
        factors[weight] = _factor(results[0], _bias(operands, at), square)
        return [_rescaled(n, operands, results[0], factors[weight])]

    Walker(filled, adjust).run(inputs)
    for name, factor in factors.items():
        mark(names[name], scaled(recipe_of(names[name]) or {}, factor))
    return seeded


def _random_constants(model: ModelProto) -> dict[str, TensorProto]:
    """The constants of the main graph that recipes make of random numbers, by the name of their value."""
    constants = {t.name: t for t in model.graph.initializer}
    constants.update(
        (n.output[0], a.t)
        for n in model.graph.node
        if n.op_type == "Constant"
        for a in n.attribute
        if a.name == "value"
    )
    return {name: t for name, t in constants.items() if (recipe_of(t) or {}).get("rule", "exact") != "exact"}


def _square(a: Array) -> float:
    return float(np.mean(np.square(a, dtype=np.float64)))


def _bias(operands: Operands, at: int | None) -> Any:
    """The bias as it is added to the result, 0 for none."""
    if at is None or len(operands) <= at or operands[at] is None:
        return 0.0
    b = operands[at]
    return b.reshape(-1, *[1] * (operands[0].ndim - 2)) if operands[1].ndim > 2 else b


def _factor(y: Array, bias: Any, square: float) -> float:
    """The positive f for which f (y - bias) + bias has this mean square: f^2 <uu> + 2 f <ub> + <bb> = square. 1 where
    there is none.
    """
    u = y - bias
    a, b, c = _square(u), float(np.mean(u * bias, dtype=np.float64)), _square(np.broadcast_to(bias, y.shape)) - square
    root = b * b - a * c
    factor = (np.sqrt(root) - b) / a if a > 0 and root >= 0 else 1.0
    return float(factor) if 1e-3 < factor < 1e3 else 1.0


def _rescaled(n: NodeProto, operands: Operands, y: Array, factor: float) -> Array:
    bias = _bias(operands, WEIGHTED[n.op_type])
    return ((y - bias) * np.float32(factor) + bias).astype(y.dtype)
