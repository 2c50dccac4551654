"""What a library can do whole, and how a call is told to it: all of it data. The calls themselves are in
tests/compiler/test_libraries.py.
"""

from __future__ import annotations

import pytest

from dnnc.backends.cuda import library
from dnnc.backends.cuda.library import (
    Called,
    Convolution,
    Image,
    LibraryCall,
    Matrix,
    Product,
    described,
    is_call,
    is_library,
    parse_call,
)
from dnnc.backends.cuda.library_cublaslt import attributes, layouts
from dnnc.backends.cuda.library_cudnn import stages, tensor, window
from dnnc.backends.cuda.library_match import steps_of, work_of
from dnnc.backends.cuda.target import FACTS
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.library import library_choices, library_templates
from dnnc.ir.errors import InternalError, ScheduleError, TargetError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

LAST = '@ "0 2 3 1"'
IMAGE = f"x: f16[2, 8, 9, 9] {LAST}, w: f16[16, 8, 3, 3] {LAST}"


def problem_of(inputs: str, *lines: str) -> Problem:
    """The group of all lines, of which the last defines y."""
    g = parse(f"def f({inputs}):\n" + "".join(f"    {line}\n" for line in lines) + "    return y\n")
    nodes = list(g.nodes())
    return classify(nodes, lower(g, nodes, g.outputs))


def matmul(inputs: str, *after: str) -> Product | Convolution | None:
    lines = ["h = matmul(x, w)", *after] if after else ["y = matmul(x, w)"]
    return work_of(problem_of(inputs, *lines), "cublaslt")


def test_a_product_with_all_that_may_follow() -> None:
    found = matmul("x: f16[4, 6, 32], w: f16[32, 24], b: f16[24]", "s = add(b, h)", "y = relu(s)")
    y = Matrix(3, False, 24, 0)
    assert found == Product(
        24, 24, 32, 1, ("f16", "f16"), "f32", Matrix(0, False, 32, 0), Matrix(1, False, 24, 0), y, 2, "relu"
    )


def test_columns_first() -> None:
    """To the library rows that follow each other are columns, so that it computes the transposed result of the
    transposed operands.
    """
    p = Product(
        5,
        7,
        3,
        2,
        ("f16", "f32"),
        "f32",
        Matrix(0, False, 3, 15),
        Matrix(1, True, 3, 21),
        Matrix(2, False, 7, 35),
        -1,
        "",
    )
    assert layouts(p) == [(2, 3, 7, 3, 21, 2), (2, 3, 5, 3, 15, 2), (0, 7, 5, 7, 35, 2)]
    assert [(n, v.value) for n, v in attributes(p)] == [(3, 1), (4, 0), (7, 1)]


@pytest.mark.parametrize(
    ("after", "bias", "number"),
    [("", -1, 1), ("relu", -1, 2), ("", 2, 4), ("relu", 2, 6), ("gelu", -1, 32), ("gelu", 2, 36)],
)
def test_epilogues(after: str, bias: int, number: int) -> None:
    m = Matrix(0, False, 8, 0)
    p = Product(8, 8, 8, 1, ("f32", "f32"), "f32", m, m, m, bias, after)
    assert dict(attributes(p))[7].value == number


@pytest.mark.parametrize(
    ("inputs", "after"),
    [
        ("x: f16[8, 32], w: f16[32, 24], b: f16[8, 24]", ("y = add(h, b)",)),  # a residual
        ("x: f16[8, 32], w: f16[32, 24], b: f16[8, 1]", ("y = add(h, b)",)),  # a number for each row
        ("x: f16[8, 32], w: f16[32, 24], b: f16[24]", ("s = relu(h)", "y = add(s, b)")),  # the wrong order
        ("x: f16[8, 32], w: f16[32, 24]", ("y = gelu(h)",)),  # by erf
        ("x: f16[8, 32], w: f16[32, 24]", ("y = tanh(h)",)),
        ("x: f16[8, 32], w: f16[32, 24]", ("s = relu(h)", "y = relu(s)")),
        (
            "x: f16[8, 32], w: f16[32, 24], b: f16[24]",
            ("s = add(h, b)", "y = cast(s, to=f32)"),
        ),  # bias and result of two types
        ("x: f64[8, 32], w: f64[32, 24]", ("y = relu(h)",)),
        ("x: f16[2, 3, 8, 32], w: f16[3, 32, 24]", ("y = relu(h)",)),  # some axes of the batch are shared
        ("x: f16[32], w: f16[32, 24]", ("y = relu(h)",)),
    ],
)
def test_what_stays_ours(inputs: str, after: tuple[str, ...]) -> None:
    assert matmul(inputs, *after) is None


def test_types_and_batches() -> None:
    wide = matmul("x: f16[8, 32], w: f16[32, 24]", "y = cast(h, to=f32)")
    assert isinstance(wide, Product) and wide.types == ("f16", "f32")
    batch = matmul("x: f32[2, 3, 8, 32], w: f32[2, 3, 32, 24]")
    assert isinstance(batch, Product) and (batch.batch, batch.m) == (6, 8)
    assert [m.batch_step for m in (batch.x, batch.w, batch.y)] == [256, 768, 192]
    assert (
        batch.math == "f32"
        and work_of(problem_of("x: f32[8, 32], w: f32[32, 24]", "y = matmul(x, w)"), "cublaslt", True).math == "tf32"
    )  # type: ignore[union-attr]
    turned = matmul('x: f16[8, 32], w: f16[32, 24] @ "1 0"')
    assert isinstance(turned, Product) and turned.w == Matrix(1, True, 32, 0)


def test_a_convolution() -> None:
    p = problem_of(
        f"{IMAGE}, b: f16[16]",
        f"h: f16[2, 16, 5, 9] {LAST} = conv(x, w, b, pads=(1, 0, 1, 2), strides=(2, 1))",
        f"y: f16[2, 16, 5, 9] {LAST} = relu(h)",
    )
    c = work_of(p, "cudnn")
    assert isinstance(c, Convolution) and (c.pads, c.strides, c.dilations, c.bias, c.after) == (
        ((1, 1), (0, 2)),
        (2, 1),
        (1, 1),
        2,
        "relu",
    )
    assert c.x == Image(0, (2, 8, 9, 9), (648, 1, 72, 8)) and stages(c) == ["conv", "bias", "relu"]
    assert {n: list(v) for n, _, v in window(c)} == {
        106: [2],
        100: [0],
        101: [1],
        105: [1, 0],
        104: [1, 2],
        103: [2, 1],
        102: [1, 1],
    }
    assert dict((n, v) for n, _, v in tensor(5, "f16", (1, 2), (2, 1), True))[907] == [True]
    assert work_of(p, "cublaslt") is None
    first = problem_of("x: f16[2, 8, 9, 9], w: f16[16, 8, 3, 3]", "y = conv(x, w)")
    assert work_of(first, "cudnn") is None  # channels are not last
    size = f"f16[2, 16, 7, 7] {LAST}"
    assert work_of(problem_of(IMAGE, f"y: {size} = conv(x, w)"), "cudnn") is not None
    assert (
        work_of(problem_of(IMAGE, f"h: {size} = conv(x, w)", f"y: {size} = relu(h)"), "cudnn") is None
    )  # no engine without a bias
    assert (
        work_of(
            problem_of(IMAGE, f"h: {size} = conv(x, w)", f"y: {size.replace('f16', 'f32')} = cast(h, to=f32)"), "cudnn"
        )
        is None
    )
    grouped = problem_of(
        f"x: f16[2, 8, 9, 9] {LAST}, w: f16[16, 4, 3, 3] {LAST}", f"y: f16[2, 16, 7, 7] {LAST} = conv(x, w, group=2)"
    )
    assert work_of(grouped, "cudnn") is None


def test_layouts_in_blocks_have_no_steps() -> None:
    g = parse('def f(x: f32[4, 6] @ "1 0", y: f32[2, 3, 4]):\n    return x, y\n')
    assert [steps_of(v.type) for v in g.inputs] == [(1, 4), (12, 4, 1)]


def test_a_call_as_bytes() -> None:
    p = problem_of("x: f16[8, 32], w: f16[32, 24], b: f16[24]", "h = matmul(x, w)", "y = add(h, b)")
    work = work_of(p, "cublaslt")
    assert work is not None
    one = LibraryCall("cublaslt", 3, work)
    assert is_call(one.code) and parse_call(one.code) == one and not is_call(b"\x7fELF")
    assert described(one) == "cuBLASLt, suggestion 3: f16[8, 32] x f16[32, 24] -> f16, bias"
    with pytest.raises(InternalError, match="compile the model again"):
        parse_call(one.code.replace(b'"format": 1', b'"format": 99'))


def test_schedules() -> None:
    """They apply only where asked for, name the kernel after the call, and stay what they are through other passes."""
    p = problem_of("x: f32[8, 32], w: f32[32, 24]", "y = matmul(x, w)")
    assert all(not t.candidates(p) and not t.space(p) for t in library_templates())
    assert not {t.name for t in templates(FACTS["sm_90a"])} & set(library.VENDORS)
    choices = library_choices(p, ("cublaslt", "cudnn"), rounded=True)
    assert (
        len(choices) == 2 * library.PLANS
        and {c.template for c in choices} == {"cublaslt"}
        and all(is_library(str(c)) for c in choices)
    )
    template = library_templates()[0]
    made = [template.apply(p, dict(c.knobs)) for c in choices]
    texts = {show_kernel(k) for k in made}
    assert len(texts) == len(choices) and show_kernel(p.kernel) not in texts
    kept = decompose(made[-1], ())
    assert isinstance(kept, Called) and kept.call == made[-1].call and kept.call.work.math == "tf32"  # type: ignore[attr-defined, union-attr]
    assert isinstance(parse_kernel(show_kernel(kept)), Kernel) and kept.name == "cublaslt_tf32_7_matmul"
    for t, count in (("f16", library.PLANS), ("f32", library.FEW_PLANS)):
        conv = problem_of(IMAGE.replace("f16", t), f"y: {t}[2, 16, 7, 7] {LAST} = conv(x, w)")
        assert len(library_choices(conv, ("cudnn",))) == count and len(
            library_choices(conv, ("cudnn",), True)
        ) == count + library.PLANS * (t == "f32")
    with pytest.raises(ScheduleError, match="cannot compute all of matmul"):
        library_templates()[1].apply(p, {"plan": 0})
    with pytest.raises(ScheduleError, match="has the knob algo"):
        template.apply(p, {"plan": 0})


def test_where_a_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = library.Vendor(
        "cuBLASLt", ("libnobodyhasthis.so.99",), "cublasLtGetVersion", "cublasLtGetStatusName", "nvidia-cublas"
    )
    monkeypatch.setattr(library, "VENDORS", {"cublaslt": missing})
    library.opened.cache_clear()
    assert library.installed() == ()
    with pytest.raises(TargetError, match=r"cuBLASLt is not here \(libnobodyhasthis.so.99.*pip install nvidia-cublas"):
        library.opened("cublaslt")
    assert all(f.name == "lib" for f in library.folders())
