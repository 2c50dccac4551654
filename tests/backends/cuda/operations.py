"""Kernels that hold every operation of the operator IR with every type, one warp each, and numbers at the edges of
these types to try them on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import parse_target
from dnnc.ir.dtype import ALL, DType, boolean, f32, f64, i64
from dnnc.ir.expr import Expr, cast, const, op
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call
from dnnc.ir.loops.text import parse_kernel

Array = Any
FLOATS, INTS = ("f32", "f64"), ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
STORED = [t for t in ALL if t.kind in "fiub"]
UNARY = ("exp", "exp2", "recip", "log", "sqrt", "erf", "tanh", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
"atanh", "floor", "ceil", "trunc",
         "rint", "log1p", "expm1", "isnan")  # fmt: skip
TRIGONOMETRY = ("sin", "cos", "tan")
BINARY = ("min", "max", "fmin", "fmax", "truncdiv", "truncmod", "floormod")
SHUFFLES = ("shfl", "shfl_xor", "shfl_up", "shfl_down")
# results that only the rounding of a library function or a sum's order decides; all others are the same bits everywhere
ROUNDED = {*UNARY, *TRIGONOMETRY, "pow", "truncmod", "floormod", "fma", "hsum", "hprod"} - {
    "floor",
    "ceil",
    "trunc",
    "rint",
    "isnan",
    "sqrt",
}


class _Results:
    """One output per operation and type, [32 * lanes]."""

    def __init__(self, b: Builder, at: Expr) -> None:
        self.b, self.at = b, at
        self.outs: dict[str, Buffer] = {}

    def put(self, name: str, e: Expr, each: int = 1) -> None:
        """`each`: elements that one thread writes."""
        out = self.outs[name] = Buffer(f"{name}_", e.dtype, (const(32 * each),))
        self.b.store(out, (self.at * each,), e, e.lanes)


def operations(t: DType, lanes: int) -> Kernel:
    """Conversions to all types, arithmetic, comparisons, choices, functions and shuffles of one type."""
    x = Buffer("x", t, (const(3), const(32 * lanes)))
    b = Builder()
    with b.loop("l", 32, "lane") as at:
        r = _Results(b, at)
        u, v, w = (x.at(n, at * lanes, lanes=lanes) for n in range(3))
        for to in STORED:
            if to.computed is to or t in (f32, f64):  # others become f32 first, which rounds twice
                r.put(f"cast_{to}", cast(u, to), lanes)
        if t.name in (*FLOATS, *INTS):
            _arithmetic(r, t, lanes, u, v, w)
        if t.kind == "b":
            for name, e in (("not", call("not", u)), ("and", u & v), ("or", u | v), ("xor", u ^ v)):
                r.put(name, e, lanes)
        if lanes > 1:
            r.put("zip_low", call("zip_low", u, v), lanes)
            r.put("zip_high", call("zip_high", u, v), lanes)
        for name in SHUFFLES:
            r.put(name, call(name, u, const(5)), lanes)
    return Kernel((Func(f"all_{t}_{lanes}", (x, *r.outs.values()), b.block()),))


def _arithmetic(r: _Results, t: DType, lanes: int, u: Expr, v: Expr, w: Expr) -> None:
    signs = {"+": "add", "-": "sub", "*": "mul"} | (
        {"/": "div"} if t.is_float else {"&": "bit_and", "|": "bit_or", "^": "bit_xor"}
    )
    for sign, name in signs.items():
        r.put(name, op(sign, u, v, dtype=t), lanes)
    for name in BINARY:
        if t.is_int or name != "truncdiv":
            r.put(name, op(name, u, v, dtype=t), lanes)
    for name in ("abs", "neg"):
        r.put(name, op(name, u), lanes)
    for sign, name in {"<": "less", "<=": "at_most", "==": "same", "!=": "other"}.items():
        r.put(name, op("select", op(sign, u, v), v, w), lanes)
    for name in ("hsum", "hprod", "hmax", "hmin") if lanes > 1 else ():
        r.put(name, call(name, u))
    if t.is_float:
        for name in UNARY:
            r.put(name, call(name, u), lanes)
        for name, args in {"fma": (u, v, w), "pow": (u, v)}.items():
            r.put(name, call(name, *args), lanes)
        r.put("ldexp", call("ldexp", u, op("max", op("min", call("rint", v), const(40.0, t)), const(-40.0, t))), lanes)
    else:
        for name, args in {
            "shl": (u, v),
            "shr": (u, v),
            "bitnot": (u,),
            **({"popcount": (u,)} if t.name == "u32" else {}),
        }.items():
            r.put(name, call(name, *args), lanes)


def trigonometry(t: DType) -> Kernel:
    """Apart from the others: CUDA's library keeps 32 to 40 bytes in local memory where it reduces huge angles."""
    x = Buffer("x", t, (const(3), const(32)))
    b = Builder()
    with b.loop("l", 32, "lane") as at:
        r = _Results(b, at)
        for name in TRIGONOMETRY:
            r.put(name, call(name, x[0, at]))
    return Kernel((Func(f"trigonometry_{t}", (x, *r.outs.values()), b.block()),))


def indices() -> Kernel:
    """Integers as indices, known and unknown, gathers, accesses of a part of a vector."""
    return parse_kernel("""
def indices(x: i64[64], y: f32[64, 64], z: i64[64], part: f32[64, 8]):
    for t in thread.x(64):
        k: i64x4 = guard(x[0:+4], 0, 64)
        part[t, 0:+4:t - 30] = y[t, k] + y[t, (lanes(4) + t) % 5 + (lanes(4) * 3 + t) // 7]
        part[t, 4:+4:2] = y[t, 60:+4:t % 5]
        z[t] = guard(x[t], 0, 64) + x[t]*x[0] - 3*x[1] + x[2] // 7 + x[t] % 5 + (63 - t) // 9 - x[t] // 8
        prefetch(addr(y[t, 0]))
""")


def each() -> list[Kernel]:
    return [*(operations(t, lanes) for lanes in (1, 4) for t in STORED), *map(trigonometry, (f32, f64)), indices()]


# --- numbers ----------------------------------------------------------------------------------------------------------


def numbers(t: DType, n: int) -> Array:
    """Edges of a type and random numbers, [3, n]: each row in another order."""
    rng = np.random.default_rng(n + t.bits)
    if t.kind == "b":
        return rng.integers(0, 2, (3, n)).astype(np.bool_)
    if t.is_int:
        lo, hi = t.range
        edges = [0, 1, 2, 3, 7, hi, hi - 1, lo, lo + 1, *([-1, -2, -7] if lo < 0 else [])]
        rows = [
            [
                edges[k % len(edges)] if k % 2 else int(rng.integers(max(lo, -100), min(hi, 100), endpoint=True))
                for k in range(n)
            ]
            for _ in range(3)
        ]
        return np.array([rng.permutation(np.array(r, object)) for r in rows]).astype(t.numpy)
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        2.5,
        -3.5,
        1e-3,
        300.0,
        -300.0,
        7e4,
        -7e4,
        3e9,
        -3e9,
        1e19,
        -1e19,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
    ]
    wide = np.array(
        [[edges[k % len(edges)] if k % 2 else rng.standard_normal() * 4 for k in range(n)] for _ in range(3)]
    )
    with np.errstate(all="ignore"):
        return np.array([rng.permutation(r) for r in wide]).astype(t.numpy)


def arguments(k: Kernel) -> dict[str, Array]:
    """Inputs and zeroed outputs of one of these kernels."""
    out: dict[str, Array] = {}
    for p in k.entry.buffers:
        shape = tuple(int(d.value) for d in p.shape)  # type: ignore[attr-defined]
        out[p.name] = np.zeros(shape, p.dtype.numpy)
    x = k.entry.buffers[0]
    if x.dtype is i64 and len(x.shape) == 1:
        out["x"][:] = np.arange(64) * 5 % 71 - 3
        out["y"][:] = np.arange(64 * 64).reshape(64, 64)
    else:
        out["x"] = numbers(x.dtype, out["x"].shape[1])
    return out


def differences(k: Kernel, got: dict[str, Array], want: dict[str, Array]) -> list[str]:
    """Outputs that differ: by bits, or by more than some units in the last place for library functions."""
    bad = []
    for p in k.entry.buffers:
        name, a, b = p.name.rstrip("_"), got[p.name], want[p.name]
        if p.dtype is boolean or not p.dtype.is_float:
            wrong = a != b
        else:
            x, y = a.astype(np.float64), b.astype(np.float64)
            wrong = ~((x == y) | (np.isnan(x) & np.isnan(y)))
            if name in ROUNDED:
                eps = 2.0**-23 if p.dtype is f32 else 2.0**-52
                with np.errstate(all="ignore"):
                    wrong &= ~(np.abs(x - y) <= 8 * eps * np.abs(y) + (1e-37 if p.dtype is f32 else 1e-307))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            bad.append(f"{k.name}.{name}{at}: got {a[at]}, expected {b[at]} ({int(wrong.sum())} of {wrong.size})")
    return bad


def interpreted(k: Kernel) -> dict[str, Array]:
    args = arguments(k)
    run_kernel(k, args)
    return args


def on_device(k: Kernel) -> list[str]:
    """Differences between a kernel's run on device 0 and the interpreter's."""
    import cupy
    from cupy.cuda import function

    _, target = parse_target("cuda")
    module = function.Module()
    module.load(compile_cuda(emit_kernel(k, "k_test", target), target.arch).cubin)
    launch, args = launch_of(k), arguments(k)
    held = [cupy.asarray(args[p.name].reshape(-1).view(np.uint8)) for p in k.entry.buffers]
    status = cupy.asarray(np.zeros(4, np.int32))
    module.get_function("k_test")(launch.grid, launch.block, (*held, status), shared_mem=launch.shared_bytes)
    got = {
        p.name: cupy.asnumpy(h).view(p.dtype.numpy).reshape(args[p.name].shape) for p, h in zip(k.entry.buffers, held)
    }
    found = differences(k, got, interpreted(k))
    if (cupy.asnumpy(status)[0] != 0) != (k.name == "indices"):
        found.append(f"{k.name}: status {cupy.asnumpy(status)}")
    return found


if __name__ == "__main__":
    found = [d for k in each() for d in on_device(k)]
    print(*found, f"{len(each())} kernels, {len(found)} results differ", sep="\n")
