"""Functions of arrays: `jit`, gradients, loops and branches keep the types of the functions that they take."""

import sys
from collections.abc import Callable

import numpy as np

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

import dnnc
import dnnc.array as xp
from dnnc.array import Array
from dnnc.ir.graph import Graph
from dnnc.jitted import Jitted

Params = dict[str, Array]
a = xp.asarray([1.0, 2.0])
params: Params = {"w": a}


@dnnc.jit
def plain(x: Array) -> Array:
    return x


@dnnc.jit(static="n", threads=1)
def several(x: Array, n: int) -> tuple[Array, Params]:
    return x * n, {"y": x}


class Model:
    @dnnc.jit
    def call(self, x: Array) -> Array:
        return -x


def loss(p: Params, x: Array) -> Array:
    return (p["w"] @ x).sum()


def with_aux(p: Params, x: Array) -> tuple[Array, Array]:
    return loss(p, x), x


def energy(x: Array, y: Array) -> Array:
    return (x * y).sum()


assert_type(plain, Jitted[Array])
assert_type(plain(np.zeros(3)), Array)
assert_type(several(a, 2), tuple[Array, Params])
assert_type(Model().call(a), Array)
assert_type(plain.traces, int)

assert_type(dnnc.grad(loss)(params, a), Params)
assert_type(dnnc.grad(loss, argnums=1)(params, a), Array)
assert_type(dnnc.grad(loss, argnums=(0, 1))(params, a), tuple[Params, Array])
assert_type(dnnc.grad(with_aux, has_aux=True)(params, a), tuple[Params, Array])
assert_type(dnnc.value_and_grad(loss)(params, a), tuple[Array, Params])
assert_type(dnnc.value_and_grad(loss, argnums=(0, 1))(params, a), tuple[Array, tuple[Params, Array]])
assert_type(dnnc.value_and_grad(with_aux, has_aux=True)(params, a), tuple[tuple[Array, Array], Params])
assert_type(dnnc.grad("m.onnx", wrt=True, cotangent="sum"), Graph)
assert_type(dnnc.value_and_grad("m.onnx", wrt=["w"]), Graph)

value, pullback = dnnc.vjp(energy, a, a)
assert_type(value, Array)
assert_type(dnnc.jvp(energy, (a, a), (a, a)), tuple[Array, Array])
assert_type(dnnc.linearize(energy, a, a)[1](a, a), Array)
assert_type(dnnc.jacrev(energy)(a, a), Array)
assert_type(dnnc.hessian(energy)(a, a), Array)
assert_type(dnnc.vmap(energy)(a, a), Array)
assert_type(dnnc.vmap(several, in_axes=(0, None))(a, 2), tuple[Array, Params])
assert_type(dnnc.checkpoint(loss)(params, a), Array)
assert_type(dnnc.stop_gradient(params), Params)
assert_type(dnnc.cond(a.sum() > 0, plain, xp.tanh, a), Array)


def not_done(s: tuple[Array, Array]) -> Array:
    return s[0] < 3


def step(s: tuple[Array, Array]) -> tuple[Array, Array]:
    return s[0] + 1, s[1] * 2


def row(s: Array, x: Array) -> tuple[Array, Params]:
    return s + x, {"s": s}


assert_type(dnnc.while_loop(not_done, step, (a, a)), tuple[Array, Array])
assert_type(dnnc.while_loop(not_done, step, (0, a)), tuple[Array, Array])
assert_type(dnnc.scan(row, a, xs=a), tuple[Array, Params])
assert_type(dnnc.scan(row, 0.0, xs=a), tuple[Array, Params])


@dnnc.custom_vjp
def clipped(x: Array) -> Array:
    return x


def forward(x: Array) -> tuple[Array, None]:
    return x, None


def backward(_: None, g: Array) -> tuple[Array]:
    return (xp.clip(g, -1, 1),)


clipped.defvjp(forward, backward)
assert_type(clipped(a), Array)

compiled: Callable[..., Array] = plain
print(plain(a).bogus)  # error
print(several(a, 2)[1].shape)  # error
dnnc.jit(loss, optlevel=3)  # error
dnnc.jit(static="n", thread=1)  # error
dnnc.grad("m.onnx", wrt=True, cotangen="sum")  # error
dnnc.grad(loss, argnum=1)  # error
dnnc.checkpoint(loss)(params)  # error
dnnc.custom_vjp(loss).defvpj(loss, loss)  # error
