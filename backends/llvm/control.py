"""Loops and branches as functions of the entry module, called as kernels are: pointers in, all threads take part.

A body is a function of the shape of the entry function. Its buffers are an array on each thread's stack, filled anew
for every iteration: the number of the iteration, carried values in one of two memories in turn, a row of each scanned
operand, captured values; then the memory of the next condition, the carried values in the other memory, a row of each
stacked result. All threads run the same control flow; a condition is written by one kernel, read by all after a
barrier, and kept in two places in turn, so that nobody overwrites what a slower thread still reads.
"""

from __future__ import annotations

from dnnc.backends.llvm.entry import body_lines, declarations
from dnnc.backends.runtime.frames import ALIGN, FRAME_BARRIER
from dnnc.backends.runtime.program import Branch, Control, Loop, Row


def control_text(c: Control) -> str:
    """A loop or branch as LLVM text: its function, those of its bodies, and declarations of what they call."""
    calls = c.body if isinstance(c, Loop) else (*c.then, *c.other)
    return "\n".join([*declarations(calls), *(_loop(c) if isinstance(c, Loop) else _branch(c))]) + "\n"


def _head(symbol: str, args: int, buffers: int) -> list[str]:
    params = ", ".join([*(f"ptr %p{k}" for k in range(args)), "ptr %frame", "i64 %tid", "i64 %nthreads"])
    return [
        f"define void @{symbol}({params}) nounwind {{",
        "entry:",
        f"  %barrier.p = getelementptr i64, ptr %frame, i64 {FRAME_BARRIER}",
        "  %barrier = load ptr, ptr %barrier.p",
        f"  %local = alloca [{max(buffers, 1)} x ptr], align 8",
        *(f"  %l{k} = getelementptr ptr, ptr %local, i64 {k}" for k in range(buffers)),
    ]


def _loop(c: Loop) -> list[str]:
    inputs = 1 + len(c.carried) + len(c.scanned) + len(c.captured)
    made = inputs + (c.condition is not None)
    lines = [*body_lines(c.body, f"{c.symbol}_body"), *_head(c.symbol, c.args, made + len(c.carried) + len(c.stacked))]
    lines += ["  %number = alloca i64, align 8", "  store ptr %number, ptr %l0", "  %alone = icmp eq i64 %tid, 0"]
    first = 1 + len(c.carried) + len(c.scanned)
    lines += [f"  store ptr %p{a}, ptr %l{first + k}" for k, a in enumerate(c.captured)]
    lines += ["  br i1 %alone, label %init, label %ready", "init:"]
    lines += [f"  call void @copy_bytes(ptr %p{x.end}, ptr %p{x.start}, i64 {x.nbytes})" for x in c.carried]
    lines += ["  br label %ready", "ready:", "  call void %barrier(ptr %frame)", *_limit(c)]
    lines += [
        "  br i1 %start, label %loop, label %done",
        "loop:",
        "  %k = phi i64 [0, %ready], [%next, %loop]",
        "  store i64 %k, ptr %number",
    ]
    lines += ["  %bit = and i64 %k, 1", "  %odd = icmp ne i64 %bit, 0"]
    for j, x in enumerate(c.carried):
        lines += [
            f"  %c{j}.in = select i1 %odd, ptr %p{x.other}, ptr %p{x.end}",
            f"  %c{j}.out = select i1 %odd, ptr %p{x.end}, ptr %p{x.other}",
            f"  store ptr %c{j}.in, ptr %l{1 + j}",
            f"  store ptr %c{j}.out, ptr %l{made + j}",
        ]
    for j, r in enumerate((*c.scanned, *c.stacked)):
        slot = 1 + len(c.carried) + j if j < len(c.scanned) else made + len(c.carried) + j - len(c.scanned)
        lines += _row(r, j, slot, c.length)
    if c.condition is not None:
        lines += [
            f"  %n.at = mul i64 %bit, {ALIGN}",
            f"  %n.p = getelementptr i8, ptr %p{c.next_condition}, i64 %n.at",
            f"  store ptr %n.p, ptr %l{inputs}",
        ]
    lines += [f"  %status = call i64 @{c.symbol}_body(ptr %frame, ptr %local, ptr null, i64 %tid, i64 %nthreads)"]
    lines += [
        "  call void %barrier(ptr %frame)",
        "  %next = add i64 %k, 1",
        *_again(c),
        "  br i1 %more, label %loop, label %done",
    ]
    lines += [
        "done:",
        "  %count = phi i64 [0, %ready], [%next, %loop]",
        "  %count.bit = and i64 %count, 1",
        "  %moved = icmp ne i64 %count.bit, 0",
    ]
    lines += ["  %copies = and i1 %moved, %alone", "  br i1 %copies, label %last, label %out", "last:"]
    lines += [f"  call void @copy_bytes(ptr %p{x.end}, ptr %p{x.other}, i64 {x.nbytes})" for x in c.carried]
    return [*lines, "  br label %out", "out:", "  ret void", "}"]


def _limit(c: Loop) -> list[str]:
    """%trips, the iterations at most, and %start: is there a first one?"""
    lines = [f"  %asked = load i64, ptr %p{c.trips}"] if c.trips is not None else []
    if c.trips is None:
        lines.append(f"  %trips = add i64 {c.length if c.length is not None else 2**63 - 1}, 0")
    elif c.length is None:
        lines.append("  %trips = add i64 %asked, 0")
    else:
        lines += [
            f"  %fewer = icmp slt i64 %asked, {c.length}",
            f"  %trips = select i1 %fewer, i64 %asked, i64 {c.length}",
        ]
    lines.append("  %some = icmp sgt i64 %trips, 0")
    if c.condition is None:
        return [*lines, "  %start = and i1 %some, true"]
    return [
        *lines,
        f"  %first = load i8, ptr %p{c.condition}",
        "  %holds = icmp ne i8 %first, 0",
        "  %start = and i1 %some, %holds",
    ]


def _again(c: Loop) -> list[str]:
    lines = ["  %within = icmp slt i64 %next, %trips"]
    if c.condition is None:
        return [*lines, "  %more = and i1 %within, true"]
    return [*lines, "  %n = load i8, ptr %n.p", "  %still = icmp ne i8 %n, 0", "  %more = and i1 %within, %still"]


def _row(r: Row, j: int, slot: int, length: int | None) -> list[str]:
    at = [f"  %r{j}.k = sub i64 {(length or 0) - 1}, %k"] if r.backward else [f"  %r{j}.k = add i64 %k, 0"]
    return [
        *at,
        f"  %r{j}.at = mul i64 %r{j}.k, {r.nbytes}",
        f"  %r{j} = getelementptr i8, ptr %p{r.arg}, i64 %r{j}.at",
        f"  store ptr %r{j}, ptr %l{slot}",
    ]


def _branch(c: Branch) -> list[str]:
    lines = [*body_lines(c.then, f"{c.symbol}_then"), *body_lines(c.other, f"{c.symbol}_other")]
    lines += _head(c.symbol, c.args, len(c.captured) + len(c.made))
    lines += [f"  store ptr %p{a}, ptr %l{k}" for k, a in enumerate((*c.captured, *c.made))]
    lines += [
        f"  %given = load i8, ptr %p{c.condition}",
        "  %holds = icmp ne i8 %given, 0",
        "  br i1 %holds, label %then, label %other",
    ]
    for name in ("then", "other"):
        lines += [
            f"{name}:",
            (
                f"  %{name}.status = call i64 @{c.symbol}_{name}(ptr %frame, ptr %local, ptr null, i64 %tid, i64 "
                "%nthreads)"
            ),
        ]
        lines.append("  br label %out")
    return [*lines, "out:", "  ret void", "}"]
