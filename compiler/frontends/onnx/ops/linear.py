"""Converters of matrix products: MatMul, Gemm and Einsum, which becomes transposes, reshapes and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.ir.errors import ModelError, count
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim, product

Converter = Callable[[Call], Any]


def matmul(c: Call) -> Any:
    return c.b.matmul(c.x(0), c.x(1))


def gemm(c: Call) -> Any:
    a, b, bias = c.x(0), c.x(1), c.opt(2)
    alpha, beta = c.number("alpha", 1.0), c.number("beta", 1.0)
    if not a.type.dtype.is_float:  # whole factors of integers
        alpha, beta = int(alpha), int(beta)
    if bias is not None and bias.type.rank > 2:
        bias = c.b.reshape(bias, shape=bias.type.shape[-2:])
    return c.b.gemm(a, b, bias, alpha=alpha, beta=beta, trans_a=c.flag("transA"), trans_b=c.flag("transB"))


class _Term:
    """An operand with a letter per axis; letters are unique once its diagonals are taken."""

    def __init__(self, value: Value, letters: str) -> None:
        self.value, self.letters = value, letters

    def dim(self, letter: str) -> Dim:
        return self.value.type.shape[self.letters.index(letter)]


def einsum(c: Call) -> Value:
    equation = c.text("equation").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    xs = c.all()
    if len(terms) != len(xs):
        raise ModelError(f"equation {equation!r} has {count(len(terms), 'operand')}, {len(xs)} are given")
    ranks = [x.type.rank - len(t.replace("...", "")) for x, t in zip(xs, terms)]
    width = max((r for r, t in zip(ranks, terms) if "..." in t), default=0)
    free = [chr(c_) for c_ in range(0x100, 0x100 + width)]  # letters of the axes that `...` stands for
    terms = [t.replace("...", "".join(free[width - r :]) if r else "") for t, r in zip(terms, ranks)]
    if not arrow:
        seen = "".join(terms)
        result = "".join(free) + "".join(sorted(x for x in set(seen) if seen.count(x) == 1 and x not in free))
    result = result.replace("...", "".join(free))
    for x, t in zip(xs, terms):
        if len(t) != x.type.rank:
            raise ModelError(f"equation {equation!r}: {t!r} does not fit to {x.type}")
    if len(set(result)) != len(result) or not set(result) <= set("".join(terms)):
        raise ModelError(
            f"equation {equation!r}: the result {result!r} repeats an index or has one that no operand has"
        )
    return _contract(c, [_diagonal(c, _Term(x, t)) for x, t in zip(xs, terms)], result)


def _contract(c: Call, terms: list[_Term], result: str) -> Value:
    done = terms[0]
    for k, t in enumerate(terms[1:], 1):
        later = set(result).union(*(u.letters for u in terms[k + 1 :]))
        done = _pair(c, _summed(c, done, later | set(t.letters)), _summed(c, t, later | set(done.letters)), later)
    done = _summed(c, done, set(result))
    return _arranged(c, done, result)


def _diagonal(c: Call, t: _Term) -> _Term:
    """Repeated letters: what lies off the diagonal is masked out and summed away."""
    while len(set(t.letters)) != len(t.letters):
        letter = next(x for x in t.letters if t.letters.count(x) > 1)
        i = t.letters.index(letter)
        j = t.letters.index(letter, i + 1)
        n, rank = t.value.type.shape[i], t.value.type.rank
        mask = c.b.eye(rows=n, columns=n, dtype=t.value.type.dtype)
        mask = c.b.reshape(mask, shape=tuple(n if k in (i, j) else 1 for k in range(rank)))
        t = _Term(c.b.reduce_sum(c.b.mul(t.value, mask), axes=(j,)), t.letters[:j] + t.letters[j + 1 :])
    return t


def _summed(c: Call, t: _Term, keep: set[str]) -> _Term:
    """The sum over letters that nobody needs any more."""
    axes = tuple(k for k, x in enumerate(t.letters) if x not in keep)
    return _Term(c.b.reduce_sum(t.value, axes=axes), "".join(x for x in t.letters if x in keep)) if axes else t


def _arranged(c: Call, t: _Term, letters: Sequence[str]) -> Value:
    """The operand with its axes in the given order, 1 where it lacks one."""
    have = [x for x in letters if x in t.letters]
    perm = tuple(t.letters.index(x) for x in have)
    v = t.value if perm == tuple(range(len(perm))) else c.b.transpose(t.value, perm=perm)
    shape = tuple(t.dim(x) if x in t.letters else 1 for x in letters)
    return v if len(have) == len(letters) else c.b.reshape(v, shape=shape)


def _pair(c: Call, a: _Term, b: _Term, later: set[str]) -> _Term:
    """Two operands as one matrix product: [batch, rows, summed] x [batch, summed, columns]."""
    shared = [x for x in a.letters if x in b.letters]
    batch, summed = [x for x in shared if x in later], [x for x in shared if x not in later]
    rows, columns = [x for x in a.letters if x not in shared], [x for x in b.letters if x not in shared]
    if any(t.dim(x) == 1 for x in summed for t in (a, b)) or not summed:
        letters = [*batch, *summed, *rows, *columns]
        y = c.b.mul(_arranged(c, a, letters), _arranged(c, b, letters))
        return _summed(c, _Term(y, "".join(letters)), later)
    x, y = _arranged(c, a, [*batch, *rows, *summed]), _arranged(c, b, [*batch, *summed, *columns])
    ra, cb, k = (product([t.dim(x) for x in xs]) for t, xs in ((a, rows), (b, columns), (a, summed)))
    x = c.b.reshape(x, shape=(*(a.dim(i) for i in batch), ra, k))
    y = c.b.reshape(y, shape=(*(b.dim(i) for i in batch), k, cb))
    z = c.b.matmul(x, y)
    lead = z.type.shape[: len(batch)]
    z = c.b.reshape(z, shape=(*lead, *(a.dim(i) for i in rows), *(b.dim(i) for i in columns)))
    return _Term(z, "".join([*batch, *rows, *columns]))


LINEAR: dict[str, Converter] = {"MatMul": matmul, "Gemm": gemm, "Einsum": einsum}
