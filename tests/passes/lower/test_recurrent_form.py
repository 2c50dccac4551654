"""What is read off the body of a loop: phases, columns, and what is none of these."""

from __future__ import annotations

import pytest

from dnnc.ir.graph.text import parse
from dnnc.passes.lower.recurrent_form import NoForm, ScanForm, form_of

HEAD = (
    "def g(h: f32[2, 8], x: f32[5, 2, 16], w: f32[8, 16], u: f32[8, 8]):\n"
    "    def body(k: i64, h: f32[2, 8], r: f32[2, 16], w: f32[8, 16], u: f32[8, 8]):\n"
)
TAIL = "    return loop(None, None, h, x, w, u, body=body, carried=1, scanned=1, length=5)\n"


def form(*lines: str, tail: str = TAIL) -> ScanForm:
    g = parse(HEAD + "".join(f"        {s}\n" for s in lines) + tail)
    return form_of(next(iter(g.nodes())))


def half(v: str, k: int) -> str:
    return f"slice({v}, starts=(0, {8 * k}), steps=(1, 1), shape=(2, 8))"


def test_gates_of_one_product() -> None:
    f = form("v = add(r, matmul(h, w))", f"return mul(sigmoid({half('v', 1)}), tanh({half('v', 0)}))")
    assert (f.steps, f.batch, f.hidden, f.carried, f.stacked) == (5, 2, 8, 1, 0)
    (phase,) = f.phases
    assert [c.offset for c in phase.columns] == [0, 8] and len({c.dots for c in phase.columns}) == 1


def test_a_product_of_what_a_product_gave() -> None:
    f = form(
        "v = sigmoid(add(r, matmul(h, w)))", f"return tanh(add(matmul(mul({half('v', 0)}, h), u), {half('v', 1)}))"
    )
    assert [[c.offset for c in p.columns] for p in f.phases] == [[0, 8], [0]]


def test_matrices_may_be_turned_and_numbers_cast() -> None:
    f = form("a = matmul(cast(h, to=f16), transpose(cast(u, to=f16), perm=(1, 0)))", "return tanh(cast(a, to=f32))")
    assert len(f.phases) == 1 and len(f.phases[0].columns) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["return softmax(matmul(h, u))"], "its body has softmax"),
        (["return tanh(h)"], "has no product"),
        ([f"return tanh(matmul({half('r', 0)}, u))"], "not made of states alone"),
        (["return add(matmul(h, u), matmul(tanh(h), u))"], "several vectors at once"),
        (["return matmul(h, add(u, cast(k, to=f32)))"], "not the same in all steps"),
        (
            ["v = matmul(h, u)", "return slice(concat(v, h, axis=1), starts=(0, 4), steps=(1, 1), shape=(2, 8))"],
            "several others|another one|looks",
        ),
        (
            ["return matmul(slice(h, starts=(0, 7), steps=(1, -1), shape=(2, 8)), u)"],
            "state of another one|its body has",
        ),
    ],
)
def test_what_has_no_form(lines: list[str], said: str) -> None:
    with pytest.raises(NoForm, match=said):
        form(*lines)


def test_loops_that_the_data_ends_have_none() -> None:
    text = (
        HEAD.replace("def g(", "def g(n: i64, ")
        + "        return tanh(matmul(h, u))\n"
        + TAIL.replace("None, None", "n, None")
    )
    g = parse(text)
    with pytest.raises(NoForm, match="at run time only"):
        form_of(next(iter(g.nodes())))
