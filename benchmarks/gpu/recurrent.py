"""Recurrent layers on one GPU by the template recurrence: all steps in one kernel, beside PyTorch's layer (cuDNN).

    python benchmarks/gpu/recurrent.py [--only WORD,WORD] [--candidates N] [--warm] [--repeats N] [--json OUT]
        [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/recurrent.py     where dnnc is not installed; `make .types` makes that
                                                              folder

What a line says, and how it is measured, stands in single.py. Ours begins behind the product of all inputs, which is a
kernel of its own; cuDNN's layer has inputs of 8 elements. The states are scaled where they are multiplied, so that
random weights do not make errors grow from step to step.
"""

from __future__ import annotations

import sys
from typing import Any

from single import Case, Schedules, options, run

from dnnc.ir.graph.text import parse
from dnnc.passes.lower.recurrence import lower_recurrence
from dnnc.passes.schedule.problem import Choice, Problem, classify

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
WIDTH = 8  # of cuDNN's inputs


def text(kind: str, steps: int, batch: int, hidden: int, t: str) -> str:
    """Weights lie as [gates * hidden, hidden]."""

    def part(v: str, k: int) -> str:
        return f"slice({v}, starts=(0, {k * hidden}), steps=(1, 1), shape=({batch}, {hidden}))"

    gates, state = GATES[kind], f"f32[{batch}, {hidden}]"
    body = {
        "lstm": f"""v = add(r, p)
        d = add(mul(sigmoid({part("v", 2)}), c), mul(sigmoid({part("v", 0)}), tanh({part("v", 3)})))
        y = mul(sigmoid({part("v", 1)}), tanh(d))
        return y, d, y""",
        "gru": f"""z = sigmoid(add({part("r", 0)}, {part("p", 0)}))
        e = tanh(add({part("r", 2)}, mul(sigmoid(add({part("r", 1)}, {part("p", 1)})), {part("p", 2)})))
        y = add(mul(sub(1.0, z), e), mul(z, h))
        return y, y""",
        "rnn": "y = tanh(add(r, p))\n        return y, y",
    }[kind]
    states, names = (f"h: {state}, c: {state}", "h, c") if kind == "lstm" else (f"h: {state}", "h")
    matrix = f"w: {t}[{gates * hidden}, {hidden}]"
    return f"""def f({states}, x: f32[{steps}, {batch}, {gates * hidden}], {matrix}):
    def body(k: i64, {states}, r: f32[{batch}, {gates * hidden}], {matrix}):
        p = cast(matmul(cast(mul(h, {1 / hidden}), to={t}), transpose(w, perm=(1, 0))), to=f32)
        {body}
    return recurrence({names}, x, w, body=body, carried={len(names.split(","))}, scanned=1, length={steps})
"""


def layer(kind: str, steps: int, hidden: int, batch: int = 1, t: str = "f32") -> Case:
    g = parse(text(kind, steps, batch, hidden, t))
    (n,) = g.nodes()
    made: list[Any] = []

    def peer(*given: Any) -> Any:
        import torch

        if not made:
            module = (
                {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[kind](WIDTH, hidden).cuda().eval()
            )
            dtype = torch.float32 if t == "f32" else torch.float16
            made.extend([module.to(dtype), torch.randn(steps, batch, WIDTH, device="cuda", dtype=dtype)])
        with torch.no_grad():
            return made[0](made[1])[0]

    def want(h: Any, *given: Any) -> Any:
        import torch

        *rest, x, w = given
        c, rows = (rest[0] if rest else None), []
        for r in x:
            p = h / hidden @ w.T
            if kind == "lstm":
                i, o, f, e = (r + p).chunk(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(e)
                h = torch.sigmoid(o) * torch.tanh(c)
            elif kind == "gru":
                (rz, rr, rh), (pz, pr, ph) = r.chunk(3, -1), p.chunk(3, -1)
                z = torch.sigmoid(rz + pz)
                h = (1 - z) * torch.tanh(rh + torch.sigmoid(rr + pr) * ph) + z * h
            else:
                h = torch.tanh(r + p)
            rows.append(h)
        return torch.stack([*rows, h, *([c] if c is not None else [])])

    return Case(f"{t}_{kind}_{steps}x{batch}x{hidden}", classify([n], lower_recurrence(g, n)), peer, want)


def cases() -> list[Case]:
    sizes = [
        ("lstm", 64),
        ("lstm", 100),
        ("lstm", 128),
        ("lstm", 256),
        ("lstm", 384),
        ("gru", 64),
        ("gru", 128),
        ("gru", 256),
        ("gru", 384),
        ("rnn", 256),
    ]
    out = [layer(kind, 100, hidden) for kind, hidden in sizes]
    out += [layer("lstm", 100, 256, batch) for batch in (4, 32)]
    return out + [layer("lstm", 100, hidden, t="f16") for hidden in (128, 256, 512)]


def main() -> int:
    ap = options(__doc__)
    ap.add_argument("--candidates", type=int, default=4, help="schedules to try")
    a = ap.parse_args()
    schedules = Schedules()

    def choices(problem: Problem) -> list[Choice]:
        return schedules.offered(problem, ("recurrence",), a.candidates)

    return run(cases(), choices, schedules, a)


if __name__ == "__main__":
    sys.exit(main())
