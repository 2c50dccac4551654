"""Sizes that torch keeps as sympy expressions, as dims of the graph IR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Expr, const, dim, maximum, minimum, unwrap
from dnnc.ir.types import Dim

LARGEST = 1 << 40  # what torch gives as an upper bound beyond this is none


class Dims:
    """Dims of a program. `known`: numbers; `names`: of others; `ranges`: where torch's records narrow them."""

    def __init__(
        self,
        known: Mapping[str, int] | None = None,
        names: Mapping[str, str] | None = None,
        ranges: Mapping[str, Any] | None = None,
    ) -> None:
        self.known, self.names, self.ranges = dict(known or {}), dict(names or {}), dict(ranges or {})
        self.made: dict[str, Dim] = {}

    def of(self, size: Any) -> Dim:
        """A size: a number, a SymInt, or a sympy expression."""
        if isinstance(size, int):
            return size
        node = getattr(size, "node", None)
        if node is None:
            return self._dim(size, None)
        return self._dim(node.expr, node.shape_env)

    def shape(self, sizes: Any) -> tuple[Dim, ...]:
        return tuple(self.of(s) for s in sizes)

    def known_part(self, e: Any) -> Any:
        """A sympy expression with the sizes that are numbers."""
        return e.subs({s: self.known[str(s)] for s in e.free_symbols if str(s) in self.known})

    def value(self, v: Any) -> bool:
        """A condition on sizes. UnsupportedError unless these are known."""
        e = self.known_part(v.node.expr)
        if e.free_symbols:
            raise UnsupportedError(f"the condition {e} depends on sizes; fix them, or compute it in a tensor")
        return bool(e)

    def _dim(self, e: Any, env: Any) -> Dim:
        found: Dim = unwrap(self._expr(e, env))
        return found

    def _expr(self, e: Any, env: Any) -> Expr:
        if e.is_Integer:
            return const(int(e))
        if e.is_Symbol:
            return const(self._symbol(e, env))
        kind = type(e).__name__
        if (
            kind in ("ToFloat", "TruncToInt", "IntTrueDiv", "FloatTrueDiv", "FloorToInt", "CeilToInt", "RoundToInt")
            or e.is_Float
        ):
            raise UnsupportedError(f"the size {e} is computed with floats; compute it with integers, or fix it")
        args = [self._expr(a, env) for a in e.args]
        made = _operation(kind, args, e)
        if made is None:
            raise UnsupportedError(f"the size {e} needs {kind}, which sizes here cannot have; fix one of its sizes")
        return made

    def _symbol(self, s: Any, env: Any) -> Dim:
        name = str(s)
        if name in self.known:
            return self.known[name]
        if name not in self.made:
            if name.startswith(("u", "zuf", "zf")):
                raise UnsupportedError(
                    f"the size {name} depends on the contents of a tensor; programs know sizes from the shapes of "
                    "their inputs"
                )
            low, high = bounds_of(self.ranges.get(name) or (env.var_to_range.get(s) if env is not None else None))
            self.made[name] = dim(self.names.get(name, name), max(low, 1), high)
        return self.made[name]


def bounds_of(found: Any) -> tuple[int, int | None]:
    """The least and the largest size of one of torch's ranges."""
    if found is None:
        return 0, None
    low = int(found.lower) if found.lower.is_number and found.lower.is_finite and abs(found.lower) < LARGEST else 0
    high = int(found.upper) if found.upper.is_number and found.upper.is_finite and found.upper < LARGEST else None
    return low, high


def _operation(kind: str, args: list[Expr], e: Any) -> Expr | None:
    if kind in ("Add", "Mul", "Max", "Min"):
        join = {"Add": lambda a, b: a + b, "Mul": lambda a, b: a * b, "Max": maximum, "Min": minimum}[kind]
        total = args[0]
        for a in args[1:]:
            total = join(total, a)
        return total
    if kind == "Pow" and e.args[1].is_Integer and 0 < int(e.args[1]) < 8:
        total = args[0]
        for _ in range(int(e.args[1]) - 1):
            total = total * args[0]
        return total
    if kind in ("FloorDiv", "CleanDiv"):
        return args[0] // args[1]
    if kind in ("Mod", "PythonMod"):
        return args[0] % args[1]
    if kind == "CeilDiv":
        return (args[0] + args[1] - 1) // args[1]
    if kind == "ModularIndexing":
        return (args[0] // args[1]) % args[2]
    return None
