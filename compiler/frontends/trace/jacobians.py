"""Derivative matrices of functions: `jacrev`, `jacfwd`, `hessian`, row by row or column by column under `vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, overload

from dnnc.array.core import Array, namespace
from dnnc.frontends.trace.gradients import TREES, linearize, positions, vjp
from dnnc.frontends.trace.vmap import vmap
from dnnc.ir import checks
from dnnc.pytree import flatten, unflatten


@overload
def jacrev(fn: Callable[Concatenate[Array, ...], Array]) -> Callable[..., Array]: ...
@overload
def jacrev(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]: ...
def jacrev(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives the Jacobian of `fn` by some arguments, in reverse mode: one pullback for each result.

    Args:
        fn: gives arrays of real floats, or a tree of them; with `has_aux` a pair of that and further results.
        argnums: the positional arguments to differentiate by.
        has_aux: does `fn` give results beside those?

    Returns:
        A function of the same arguments. Its result has the structure of the results, with the structure of the
        argument in the place of each array (a tuple of such for several `argnums`): arrays of shape
        `result.shape + argument.shape`. With `has_aux` a pair of this and the further results.
    """
    checks.function(fn, "jacrev")

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        results, pull, *aux = vjp(*_chosen(fn, args, kwargs, argnums, "jacrev"), has_aux=has_aux)
        leaves, tree = flatten(results, "", TREES)
        arrays = [x for _, x in leaves]

        def rows(k: int) -> Any:
            """The Jacobian of one result by all arguments."""

            def pulled(row: Array) -> Any:
                xp = namespace()
                return pull(unflatten(tree, [row if j == k else xp.zeros_like(a) for j, a in enumerate(arrays)]))

            found = vmap(pulled)(_basis(arrays[k]))
            blocks = _mapped(lambda a: a.reshape(*arrays[k].shape, *a.shape[1:]), found)
            return blocks[0] if isinstance(argnums, int) else blocks

        made = unflatten(tree, [rows(k) for k in range(len(arrays))])
        return (made, aux[0]) if has_aux else made

    return differentiated


@overload
def jacfwd(fn: Callable[Concatenate[Array, ...], Array]) -> Callable[..., Array]: ...
@overload
def jacfwd(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]: ...
def jacfwd(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The same Jacobian as `jacrev` gives, in forward mode: one pushforward for each element of the arguments."""
    checks.function(fn, "jacfwd")

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(fn, args, kwargs, argnums, "jacfwd")
        results, push, *aux = linearize(*chosen, has_aux=has_aux)
        leaves, tree = flatten(tuple(chosen[1:]), "", TREES)
        arrays = [x if isinstance(x, Array) else namespace().asarray(x) for _, x in leaves]
        outputs, shape = flatten(results, "", TREES)

        def columns(k: int) -> list[Array]:
            """The derivative of all results by one array."""

            def pushed(column: Array) -> Any:
                xp = namespace()
                return push(*unflatten(tree, [column if j == k else xp.zeros_like(a) for j, a in enumerate(arrays)]))

            found, _ = flatten(vmap(pushed, out_axes=-1)(_basis(arrays[k])), "", TREES)
            return [a.reshape(*a.shape[:-1], *arrays[k].shape) for _, a in found]

        every = [columns(k) for k in range(len(arrays))]
        blocks = [unflatten(tree, [c[i] for c in every]) for i in range(len(outputs))]
        made = unflatten(shape, [b[0] if isinstance(argnums, int) else b for b in blocks])
        return (made, aux[0]) if has_aux else made

    return differentiated


@overload
def hessian(fn: Callable[Concatenate[Array, ...], Array]) -> Callable[..., Array]: ...
@overload
def hessian(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]: ...
def hessian(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives the second derivatives of `fn` by some arguments: forward mode over reverse mode.

    Of a function with one result of shape `()` and one array of shape `s`, an array of shape `s + s`. For the product
    of the Hessian and a vector take `jvp` of `grad`, which costs one gradient.
    """
    checks.function(fn, "hessian")
    return jacfwd(jacrev(fn, argnums, has_aux), argnums, has_aux)


def _chosen(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Any, argnums: int | Sequence[int], what: str
) -> list[Any]:
    """A function of the chosen arguments alone, and these."""
    checks.function(fn, what, args, kwargs)
    chosen = positions(argnums, len(args), what)

    def inner(*some: Any) -> Any:
        given = list(args)
        for k, x in zip(chosen, some):
            given[k] = x
        return fn(*given, **kwargs)

    return [inner, *(args[k] for k in chosen)]


def _basis(a: Array) -> Array:
    """The unit vectors of an array's space, along axis 0."""
    size = a.size
    return namespace().eye(size, dtype=a.dtype).reshape(size, *a.shape)  # type: ignore[no-any-return]


def _mapped(f: Callable[[Any], Any], tree: Any) -> Any:
    leaves, shape = flatten(tree, "", TREES)
    return unflatten(shape, [f(x) for _, x in leaves])
