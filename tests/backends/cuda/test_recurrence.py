"""Recurrences in one kernel: interpreted (values, races, barriers of clusters), compiled without spills, and whole
recurrent layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dnnc
from dnnc.backends import reachable
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates import overlapped
from dnnc.backends.cuda.templates.reduction import recurrence
from dnnc.backends.cuda.templates.reduction.recurrence import Plan, plans
from dnnc.ir.errors import VerifyError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import GPU_SPLIT, TargetFacts
from dnnc.ir.tolerances import bound
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.recurrence import Recurrent, lower_recurrence
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.schedule.problem import Problem, classify
from dnnc.tools.sample_graphs import graph_of
from support.devices import install

H200 = FACTS["sm_90a"]
Array = Any
GATES = {"lstm": 4, "gru": 3, "reset_first": 3, "rnn": 1}


def text(cell: str, steps: int, batch: int, hidden: int) -> str:
    """A layer's loop; `reset_first`: a GRU that multiplies the state by its reset gate before the product."""
    gates = GATES[cell]
    state, row = f"f32[{batch}, {hidden}]", f"f32[{batch}, {gates * hidden}]"

    def part(v: str, k: int, n: int = 1) -> str:
        return f"slice({v}, starts=(0, {k * hidden}), steps=(1, 1), shape=({batch}, {n * hidden}))"

    lines = {
        "lstm": [
            "v = add(r, matmul(h, w))",
            f"d = add(mul(sigmoid({part('v', 2)}), c), mul(sigmoid({part('v', 0)}), tanh({part('v', 3)})))",
            f"y = mul(sigmoid({part('v', 1)}), tanh(d))",
            "return y, d, y",
        ],
        "gru": [
            "v = matmul(h, w)",
            f"z = sigmoid(add({part('r', 0)}, {part('v', 0)}))",
            f"e = tanh(add({part('r', 2)}, mul(sigmoid(add({part('r', 1)}, {part('v', 1)})), {part('v', 2)})))",
            "y = add(mul(sub(1.0, z), e), mul(z, h))",
            "return y, y",
        ],
        "reset_first": [
            f"v = sigmoid(add({part('r', 0, 2)}, matmul(h, w)))",
            f"e = tanh(add({part('r', 2)}, matmul(mul({part('v', 1)}, h), u)))",
            f"y = add(mul(sub(1.0, {part('v', 0)}), e), mul({part('v', 0)}, h))",
            "return y, y",
        ],
        "rnn": ["y = tanh(add(r, matmul(h, w)))", "return y, y"],
    }[cell]
    two, carried = cell == "lstm", 2 if cell == "lstm" else 1
    more, states = (f", c: {state}", "h, c") if two else ("", "h")
    third = f", u: f32[{hidden}, {hidden}]" if cell == "reset_first" else ""
    wide = 2 if cell == "reset_first" else gates
    made = "a, b, s" if two else "a, s"
    matrices = f"w: f32[{hidden}, {wide * hidden}]{third}"
    body = "\n        ".join(lines)
    return f"""def net(h: {state}{more}, x: f32[{steps}, {batch}, {gates * hidden}], *, {matrices}):
    def body(k: i64, h: {state}{more}, r: {row}, {matrices}):
        {body}
    ({made}) = loop(None, None, {states}, x, w{", u" if third else ""}, body=body, carried={carried}, scanned=1,
        length={steps})
    return {made}
"""


def problem(cell: str, steps: int, batch: int, hidden: int, precision: str | None = None) -> tuple[Graph, Problem]:
    g = graph_of(text(cell, steps, batch, hidden))
    PassManager().run(
        g,
        LEVELS[3],
        PassContext(
            TargetFacts(supports_scan_kernel=lambda form: True, lanes=1, channels_last=True, reductions=GPU_SPLIT),
            precision=precision,
        ),
    )
    (n,) = (n for n in g.nodes() if n.op.name == "recurrence")
    return g, classify([n], lower_recurrence(g, n), g.constants)


def kernel(p: Problem, plan: Plan, target: GpuTarget = H200) -> Kernel:
    made = decompose(recurrence.apply(p, dict(recurrence._knobs(plan)), target))
    return verify_kernel(overlapped(made))


def inputs_of(g: Graph, p: Problem) -> tuple[dict[str, Array], Array]:
    """Arrays for the kernel's parameters, and what the result should be."""
    rng = np.random.default_rng(0)
    n = p.anchor
    assert n is not None
    arrays = {
        v: g.constants[v] if v in g.constants else rng.uniform(-1, 1, v.type.shape).astype(v.type.dtype.numpy)
        for v in n.inputs
        if v is not None
    }
    sub = Graph("whole")
    values = {v: sub.add_input(v.name, v.type) for v in arrays}
    sub.outputs.append(Builder(sub).op("recurrence", *(values[v] for v in n.inputs if v is not None), **n.attrs))
    (want,) = run(sub, list(arrays.values()), precision="float64")
    given = {b.name: np.ascontiguousarray(arrays[v]) for v, b in zip(p.lowered.params[:-1], p.kernel.entry.buffers)}
    return {**given, "y": np.full(want.shape, np.nan, n.output.type.dtype.numpy)}, want


def check(cell: str, plan: Plan, batch: int, hidden: int, precision: str | None = None, steps: int = 4) -> Kernel:
    g, p = problem(cell, steps, batch, hidden, precision)
    args, want = inputs_of(g, p)
    made = kernel(p, plan)
    run_kernel(made, args)
    assert np.abs(args["y"] - want).max() < (2e-6 if precision is None else 2e-3)
    return made


# cell, plan (blocks, warps, units, rows, kept), batch, hidden
CASES = [
    ("lstm", Plan(1, 2, 7, 1, 999), 1, 13),
    ("lstm", Plan(4, 2, 5, 2, 0), 3, 37),
    ("lstm", Plan(8, 2, 2, 1, 16), 2, 29),
    ("gru", Plan(2, 3, 4, 2, 24), 3, 23),
    ("gru", Plan(1, 4, 2, 4, 0), 3, 5),
    ("reset_first", Plan(1, 2, 7, 1, 20), 1, 13),
    ("reset_first", Plan(4, 2, 3, 1, 999), 3, 19),
    ("rnn", Plan(2, 1, 32, 1, 999), 1, 64),
    ("rnn", Plan(1, 1, 1, 1, 1), 1, 1),
    ("lstm", Plan(4, 2, 5, 2, 0, 1), 3, 37),
    ("lstm", Plan(8, 2, 2, 1, 16, 1), 2, 29),
    ("reset_first", Plan(4, 2, 3, 1, 999, 1), 3, 19),
    ("rnn", Plan(2, 1, 32, 1, 999, 1), 1, 64),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize("precision", [None, "float16"])
@pytest.mark.parametrize(("cell", "plan", "batch", "hidden"), CASES)
def test_the_steps(cell: str, plan: Plan, batch: int, hidden: int, precision: str | None) -> None:
    made = check(cell, plan, batch, hidden, precision)
    launch = launch_of(made)
    assert (launch.cluster, launch.block[0], launch.grid[0]) == (
        plan.blocks,
        32 * plan.warps,
        -(-batch // plan.rows) * plan.blocks,
    )


def test_the_naive_kernel() -> None:
    g, p = problem("reset_first", 3, 2, 5)
    args, want = inputs_of(g, p)
    run_kernel(verify_kernel(p.kernel), args)
    assert np.allclose(args["y"], want, atol=1e-6)


BUGS = {
    "a block ends while others write into it": ("cluster_barrier()", "barrier()", 1, "after the last peer|race"),
    "nobody waits for the vector": ("cluster_barrier()", "syncwarp()", 1, "race|after the last peer"),
    "one vector for two steps": ("[(t + 1) % 2, ", "[t % 2, ", 0, "race|nobody has written"),
    "sums are read before they are there": ("syncwarp()", "pdl_launch()", 0, "race|nobody has written"),
    "the first step is early": ("cluster_barrier()", "barrier()", 0, "race|nobody has written"),
}


SENDING_BUGS = {
    "nobody waits for the vector": (
        "mbar_wait(addr(bars[(t + 1) % 2]), t // 2 % 2)",
        "syncwarp()",
        0,
        "race|in flight",
    ),
    "too few bytes": (
        "mbar_expect(addr(bars[(t + 1) % 2]), 64)",
        "mbar_expect(addr(bars[(t + 1) % 2]), 60)",
        0,
        "deadlock|in flight",
    ),
    "an mbarrier is not armed again": ("mbar_expect(addr(bars[(t + 1) % 2]), 64)", "syncwarp()", 0, "deadlock"),
    "the other phase": ("t // 2 % 2", "(t // 2 + 1) % 2", 0, "race|in flight|deadlock"),
    "the next sums come early": ("syncwarp()", "pdl_launch()", 1, "race"),
    "mbarriers are made too late for others": ("cluster_barrier()", "barrier()", 0, "race|never initialized"),
    "a block ends early": ("cluster_barrier()", "barrier()", 1, "after the last peer"),
}


@pytest.mark.family("cases")
@pytest.mark.parametrize(("bug", "sends"), [*((b, 0) for b in BUGS), *((b, 1) for b in SENDING_BUGS)])
def test_planted_bugs(bug: str, sends: int) -> None:
    old, new, which, said = (SENDING_BUGS if sends else BUGS)[bug]
    g, p = problem("lstm", 5, 1, 16)
    args, _ = inputs_of(g, p)
    parts = show_kernel(kernel(p, Plan(2, 2, 4, 1, 999, sends))).split(old)
    assert len(parts) > which + 1
    with pytest.raises(VerifyError, match=said):
        run_kernel(parse_kernel(old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])), args)


# --- which plans there are --------------------------------------------------------------------------------------------


def first(cell: str, hidden: int, batch: int = 1, arch: str = "sm_90a", precision: str | None = None) -> Plan | None:
    low = problem(cell, 4, batch, hidden, precision)[1].lowered
    assert isinstance(low.form, Recurrent)
    found = plans(low.form.form, FACTS[arch])
    return found[0] if found else None


def test_small_layers_have_one_block_and_large_ones_a_cluster() -> None:
    small, large = first("lstm", 64), first("lstm", 256)
    assert small is not None and small.blocks == 1
    assert large is not None and large.blocks == 8


@pytest.mark.slow
def test_what_does_not_fit_stays_a_loop() -> None:
    assert first("lstm", 512) is None and first("lstm", 160, arch="sm_80") is None
    half = first("lstm", 512, precision="float16")
    assert half is not None and half.blocks == 8


def test_rows_of_a_batch_have_clusters_of_their_own_while_there_are_multiprocessors() -> None:
    few, many = first("lstm", 256, 4), first("lstm", 256, 64)
    assert few is not None and few.rows == 1
    assert many is not None and many.rows > 1


CORNERS = [
    ("lstm", 256, 1, None), ("lstm", 384, 1, None), ("lstm", 512, 1, "float16"), ("lstm", 350, 2, None),
    ("lstm", 96, 1, None), ("gru", 384, 3, None),
    ("reset_first", 384, 1, None), ("rnn", 640, 8, None), ("lstm", 96, 1, "float16"), ("gru", 100, 1, None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str) -> None:
    target, made = FACTS[arch], {}
    for cell, hidden, batch, precision in CORNERS:
        p = problem(cell, 50, batch, hidden, precision)[1]
        assert isinstance(p.form, Recurrent)
        for plan in plans(p.form.form, target)[:2]:
            made[f"k{len(made)}"] = kernel(p, plan, target)
    assert len(made) >= (2 if arch == "sm_80" else len(CORNERS))
    for symbol, c in compile_many({s: (emit_kernel(k, s, target), arch) for s, k in made.items()}).items():
        assert c.spills == 0 and c.local_bytes == 0, f"{symbol}: {c.log}"
        assert c.registers * launch_of(made[symbol]).block[0] <= target.registers


# --- whole layers -----------------------------------------------------------------------------------------------------


def layer(
    kind: str, steps: int, batch: int, hidden: int, lengths: bool = False, peephole: bool = False, **attrs: Any
) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    gates, width = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 6
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    sizes = {
        "W": (directions, gates * hidden, width),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
    }
    sizes |= {"P": (directions, 3 * hidden)} if peephole else {}
    weights = [
        numpy_helper.from_array((rng.standard_normal(s) / np.sqrt(hidden)).astype(np.float32), name)
        for name, s in sizes.items()
    ]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, width])]
    given += [helper.make_tensor_value_info("lengths", TensorProto.INT32, [batch])] if lengths else []
    given += [helper.make_tensor_value_info("h", TensorProto.FLOAT, [directions, batch, hidden])]
    names = ["x", "W", "R", "B", "lengths" if lengths else "", "h", "", "P" if peephole else ""][: 8 if peephole else 6]
    made = ["y", "last", *(["cell"] if kind == "LSTM" else [])]
    node = helper.make_node(kind, names, made, hidden_size=hidden, **attrs)
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in made]
    return helper.make_model(
        helper.make_graph([node], "layer", given, outs, weights),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"direction": "bidirectional"}),
        ("LSTM", {"lengths": True, "peephole": True}),
        ("LSTM", {"clip": 0.7}),
        ("GRU", {"direction": "reverse", "lengths": True}),
        ("GRU", {"linear_before_reset": 1}),
        ("RNN", {"activations": ["Relu"]}),
    ],
)
def test_layers(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    m = layer(kind, 6, 3, 11, **options)
    rng = np.random.default_rng(1)
    x = {
        "x": rng.standard_normal((6, 3, 6)),
        "h": rng.standard_normal((2 if options.get("direction") == "bidirectional" else 1, 3, 11)),
    }
    given = {k: v.astype(np.float32) for k, v in x.items()} | (
        {"lengths": np.array([6, 1, 4], np.int32)} if options.get("lengths") else {}
    )
    want = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
    f = dnnc.compile(m, target="cuda", cache=False, verify="kernels")
    got = f(**given)
    assert sum("recurrence" in str(k.choice) for k in f.report.programs[-1].kernels) == (
        2 if options.get("direction") == "bidirectional" else 1
    )
    for a, b in zip(want, got):
        assert np.allclose(a, b, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("sends", [0, 1])
@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 40), ("LSTM", 200), ("LSTM", 350), ("GRU", 200), ("RNN", 500)])
def test_layers_on_a_device(kind: str, hidden: int, sends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "SENDING", 1 - 1000 * sends)
    m = layer(kind, 50, 3, hidden)
    rng = np.random.default_rng(2)
    given = {
        "x": rng.standard_normal((50, 3, 6)).astype(np.float32),
        "h": rng.standard_normal((1, 3, hidden)).astype(np.float32),
    }
    want = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
    f = dnnc.compile(m, target="cuda", cache=False, verify="kernels")
    assert any("recurrence" in str(k.choice) for k in f.report.programs[-1].kernels)
    for _ in range(20):
        for a, b in zip(want, f(**given)):
            assert np.allclose(a, b, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "form"), [(None, ""), ("float16", "f16"), ("bfloat16", "bf16")])
def test_states_that_are_rounded_for_products(
    precision: str | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state between two numbers of 16 bits goes the one way or the other by how its sum was ordered; the gate's bound
    knows of it.
    """
    asked: list[str] = []

    def spy(dtype: Any, k: int, reference: Any, operands: str = "") -> float:
        asked.append(operands)
        return bound(dtype, k, reference, operands)

    monkeypatch.setattr(reachable, "bound", spy)
    install(monkeypatch)
    f = dnnc.compile(layer("LSTM", 4, 1, 12), target="cuda", precision=precision, cache=False, verify="kernels")
    assert any("recurrence" in str(k.choice) for k in f.report.programs[-1].kernels)
    assert set(asked) == {"", form}
