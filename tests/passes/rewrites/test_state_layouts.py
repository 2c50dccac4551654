"""State of a training step: which inputs lie in blocks, and which `pack` nodes are left."""

from __future__ import annotations

from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.types import ROW_MAJOR
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.passes.rewrites.state_layouts import assign_state_layouts, relabel_given

PANELS = "0/16 1/16 2 3 1%16 0%16"
BLOCKS = "0 1/16 2 3 1%16"
STEP = """def g(w: f32[32, 16, 3, 3], m: f32[32, 16, 3, 3], x: f32[2, 16, 6, 6], g: f32[2, 32, 6, 6], r: f32):
    y = conv(x, w, pads=(1, 1, 1, 1))
    n = add(mul(m, r), conv_backward_filter(x, g, kernel=(3, 3), pads=(1, 1, 1, 1)))
    v = sub(w, mul(n, r))
    return v, n, y"""


def laid_out(text: str, donated: dict[int, int]) -> Graph:
    g = parse(text)
    g.donated, g.held = donated, {0: None, 1: None}
    assign_layouts(g, 16)
    assign_state_layouts(g)
    dce(g, PassContext())
    verify(g)
    return g


def names(g: Graph) -> list[str]:
    return [n.op.name for n in g.nodes()]


def test_filters_and_their_momentum_lie_as_the_convolution_reads_them() -> None:
    g = laid_out(STEP, {0: 0, 1: 1})
    assert [str(v.type.encoding) for v in (*g.inputs[:3], *g.outputs)] == [PANELS, PANELS, "", PANELS, PANELS, ""]
    assert names(g).count("pack") == 3  # images and cotangents ahead, and the result


def test_an_input_whose_successor_is_made_in_rows_stays_in_rows() -> None:
    g = laid_out(STEP.replace("v = sub(w, mul(n, r))", "v = transpose(w, perm=(0, 1, 3, 2))"), {0: 0, 1: 1})
    assert [v.type.encoding for v in g.inputs[:1]] == [ROW_MAJOR]
    assert str(g.inputs[1].type.encoding) == PANELS


def test_an_encoding_that_is_given_holds_for_any_program() -> None:
    encoding = laid_out(STEP, {0: 0, 1: 1}).inputs[0].type.encoding
    g = parse("def g(w: f32[32, 16, 3, 3]):\n    return reduce_sum(w, axes=(1,)), add(w, w)")
    g.donated, g.held = {1: 0}, {0: encoding}
    assert assign_state_layouts(g)
    verify(g)
    assert [v.type.encoding for v in (*g.inputs, *g.outputs)] == [encoding, ROW_MAJOR, encoding]
    assert names(g) == ["pack", "reduce_sum", "add", "pack"]


def test_internal_outputs_lie_as_they_are_computed() -> None:
    text = "def g(w: f32[32, 16, 3, 3], x: f32[2, 16, 6, 6]):\n    y = conv(x, w)\n    return y, relu(y), relu(x)"
    g = parse(text)
    g.internal = {0: None, 2: None}
    assign_layouts(g, 16)
    assert assign_state_layouts(g)
    verify(g)
    assert [str(v.type.encoding) for v in g.outputs] == [BLOCKS, "", ""]
    other = parse(text)  # another program for the same readers
    other.internal = {0: g.outputs[0].type.encoding, 2: ROW_MAJOR}
    assert assign_state_layouts(other)
    verify(other)
    assert [v.type.encoding for v in other.outputs] == [v.type.encoding for v in g.outputs]


def test_layouts_follow_inputs_that_another_program_has_laid_out() -> None:
    encoding = parse(f'def g(x: f32[2, 32, 6, 6] @ "{BLOCKS}"):\n    return relu(x)').inputs[0].type.encoding
    g = parse("def g(x: f32[2, 32, 6, 6], m: f32[1, 32, 1, 1]):\n    return reduce_sum(sub(x, m), axes=(0, 2, 3))")
    g.held = {0: encoding}
    assert relabel_given(g) and assign_layouts(g, 16)
    assert not any(n.op.name == "pack" for n in g.nodes())
    assert [str(n.output.type.encoding) for n in g.nodes()] == [BLOCKS, ""]
