"""`dnnc.train_step`: a training iteration as one program, whose state stays where it is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.array.core import Array, evaluate, from_data
from dnnc.array.creation import asarray, borrowed
from dnnc.array.devices import HOST, DeviceData, device_name, moved_to
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import Lazy, leaf
from dnnc.backends.runtime.results import results
from dnnc.compile_graph import compile_graph
from dnnc.donation import packed, unpacked
from dnnc.executable import Executable
from dnnc.frontends.trace import Spec, traced
from dnnc.frontends.trace.tracer import Traced
from dnnc.ir import checks
from dnnc.ir.errors import ArtifactError, InputError, a_type, count
from dnnc.ir.graph import Graph, Value
from dnnc.ir.lru import LRU
from dnnc.ir.target import parse_target
from dnnc.ir.types import TensorType
from dnnc.optim.hyper import STRIDE, flat_numbers
from dnnc.optim.optimizer import MASK, Optimizer
from dnnc.optim.rounding import NARROW
from dnnc.options import CompileOptions, JitOptions, make_options
from dnnc.pytree import Branch, Leaf, Rules, Tree, flatten, unflatten
from dnnc.training.bound_module import BoundModule, Held, is_module
from dnnc.training.checkpoint import load_arrays, save_arrays
from dnnc.training.iteration import KEY, OPTIMIZER, PARAMS, STEP, Iteration, Parameter
from dnnc.training.resident import Resident
from dnnc.training.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dnnc.tools.profile import Profile

PROGRAMS = 16  # kept by one step: one for each shape of a batch


class TrainStep:
    """A compiled training iteration and its state; see `train_step`.

    Attributes:
        optimizer: whose groups hold the hyperparameters; a change of a number compiles nothing.
        statistics: of the last call, with `statistics=`; else None.
        traces: how often the loss function was traced.
    """

    def __init__(self, iteration: Iteration, params: Sequence[Array], options: CompileOptions, seed: int) -> None:
        self.optimizer = iteration.optimizer
        self.statistics: Statistics | None = None
        self.traces = 0
        self._iteration, self._options = iteration, options
        self._where = home_of(options)
        buffers = {} if iteration.module is None else iteration.module.buffers
        first = iteration.first(params, buffers, seed)
        evaluate(*first.values())
        self._names = tuple(first)
        self._types = [(a.shape, a.dtype) for a in first.values()]
        # how arrays of the state lie, as the first program that reads them wants it; None: in rows, until there is one
        self._lies: list[TensorType | None] = [None] * len(first)
        self._held: list[Any] = [self._own(k, first.pop(n)) for k, n in enumerate(self._names)]
        results().release()  # memory of first values: steps need none
        self._place = {n: k for k, n in enumerate(self._names)}
        self._out: list[int] = []  # arrays that a module shows as they were
        self._lent: dict[int, Held] = {}  # to the arrays of a module
        self._calls = 0
        self._programs: LRU[Any, tuple[Resident, Traced]] = LRU(PROGRAMS)
        self._numbers: tuple[float, ...] | None = None
        self._vector: Any = None
        self._structure: Any = None
        self._lend()

    # --- calls --------------------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any) -> Any:
        """One iteration on a batch.

        Args:
            *batch: what the loss function takes after the parameters: arrays, or trees of arrays.

        Returns:
            The loss as an array without axes, of before the update; `(loss, aux)` where the loss function gives these.
        """
        if self._out:
            self._take_back()
        self._read_numbers()
        buffers: list[Any] = []
        types: list[Any] = []
        turn, form = self._turn(), self._gather(batch, buffers, types)
        if form is not None:
            found = self._programs.find((tuple(types), form, turn, self._structure))
            if found is not None:
                return self._run(found, buffers)
        return self._run(*self._prepared(batch, turn))

    def _gather(self, x: Any, buffers: list[Any], types: list[Any]) -> Any:
        """Append the arrays of a batch that programs read as they are; its form, as `form_of` says it.

        None: something is to be converted first.
        """
        kind = type(x)
        if kind is tuple or kind is list or kind is dict:
            forms = []
            for v in x.values() if kind is dict else x:
                form = self._gather(v, buffers, types)
                if form is None:
                    return None
                forms.append(form)
            return (kind, tuple(x) if kind is dict else (), tuple(forms))
        if kind is Array and type(x._parts) is tuple and len(x._parts) == 1:
            x = x._parts[0].data
        if type(x) is DeviceData:
            if x.place.name != self._where:
                return None
        elif not _is_plain(x):
            return None
        buffers.append(x)
        types.append((x.dtype, x.shape))
        return True

    def _prepared(self, batch: Sequence[Any], turn: str) -> tuple[tuple[Resident, Traced], list[Any]]:
        """The program for any batch, and its arrays."""
        leaves, tree = flatten(tuple(batch), "", Rules())
        buffers, types = [], []
        for _, x in leaves:
            if _is_plain(x):
                buffers.append(x)
            else:
                x = x if isinstance(x, Array) else borrowed(x)
                buffers.append(moved_to(x._buffer(), self._where))
            types.append((x.dtype, x.shape))
        key = tuple(types), form_of(tree), turn, self._structure
        found = self._programs.find(key)
        if found is None:
            found = self._programs[key] = self._compile(tree, [Spec(shape, dtype) for dtype, shape in types], turn)
        return found, buffers

    def _run(self, program: tuple[Resident, Traced], buffers: Sequence[Any]) -> Any:
        resident, result = program
        made = resident(self._held, [self._vector, *buffers])
        self._calls += 1
        if self.optimizer.pruning is not None and self._calls % self._iteration.accumulate == 0:
            self.optimizer.pruning.after(self._calls // self._iteration.accumulate, self._masked, self._write_masks)
        arrays = [from_data(m, d) for m, d in zip(made, result.dtypes)]
        seen, self.statistics = unflatten(result.results, arrays)
        if self._iteration.statistics == "check" and self.statistics is not None:
            self.statistics.check(self._calls, gradients=not self._iteration.dynamic)
        return seen

    def _masked(self) -> dict[str, Any]:
        """Parameters with masks by name. InputError where the step was made before its optimizer was pruned."""
        names = [p.name for p in self._iteration.parameters if f"{OPTIMIZER}{p.name}.{MASK}" in self._place]
        if not names:
            raise InputError("train_step: the step has no masks: prune the optimizer first, then make the step")
        return {n: self._array(PARAMS + n).numpy() for n in names}

    def _write_masks(self, new: Mapping[str, tuple[Any, Any]]) -> None:
        """Replace masks and parameters."""
        for name, (mask, weights) in new.items():
            for place, a in ((f"{OPTIMIZER}{name}.{MASK}", mask), (PARAMS + name, weights)):
                k = self._place[place]
                self._held[k] = self._own(k, self._fitting(place, asarray(a)))
        self._release()

    def _turn(self) -> str:
        """The place of the next call among those that share an update."""
        k = self._iteration.accumulate
        if k == 1:
            return "alone"
        place = self._calls % k
        return "first" if place == 0 else "last" if place == k - 1 else "middle"

    def _read_numbers(self) -> None:
        """Bring changed hyperparameters to where the program reads them."""
        groups, defaults = self.optimizer.param_groups, self.optimizer.defaults
        numbers = tuple([g[n] for g in groups for n in defaults])
        if numbers == self._numbers:
            return
        for g in groups:
            self.optimizer.check(g)
        self._numbers = numbers
        self._structure = tuple(self.optimizer.structure(g) for g in groups)
        flat = [v for g in groups for v in flat_numbers(g, defaults).values()]
        self._vector = moved_to(np.repeat(np.array(flat, np.float64), STRIDE), self._where)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _compile(self, tree: Tree, specs: Sequence[Spec], turn: str) -> tuple[Resident, Traced]:
        self.traces += 1
        n = len(self._names)
        results: list[Tree] = []

        def iteration(state: list[Array], hyper: Array, batch: tuple[Any, ...]) -> list[Array]:
            after, seen = self._iteration.run(turn, dict(zip(self._names, state)), hyper, batch)
            leaves, shape = flatten(seen, "", Rules(any=True))
            results.append(shape)
            made = [x if isinstance(x, Array) else asarray(x) for _, x in leaves]
            return [*(after[name] for name in self._names), *made]

        state = Branch(list, tuple(range(n)), (Leaf(),) * n)
        form = Branch(tuple, (0, 1), (Branch(tuple, (0, 1, 2), (state, Leaf(), tree)), Branch(dict, (), ())))
        every = [*(Spec(s, d) for s, d in self._types), Spec(self._vector.shape, self._vector.dtype), *specs]
        names = [*(f"s{k}" for k in range(n)), "hyper", *(f"x{k}" for k in range(len(specs)))]
        found = traced(iteration, form, every, names)
        g = found.graph
        g.name = "train_step"
        changed = [k for k in range(n) if g.outputs[k] is not g.inputs[k]]
        if not draws(g, g.outputs[self._place[KEY]]):
            changed.remove(self._place[KEY])
        for k in changed:
            have, want = g.outputs[k].type, g.inputs[k].type
            if (have.dtype, have.shape) != (want.dtype, want.shape):
                raise InputError(f"train_step: {self._names[k]} is {want}, and {have} after the step")
        g.outputs = [*(g.outputs[k] for k in changed), *g.outputs[n:]]
        outputs = [*(f"new_{k}" for k in changed), *(f"result_{k}" for k in range(len(g.outputs) - len(changed)))]
        options = replace(
            self._options, dims=dict(self._options.dims), donate={f"s{k}": f"new_{k}" for k in changed}
        )  # fmt: skip
        held = {k: None if t is None else t.encoding for k, t in enumerate(self._lies)} if self._where == HOST else {}
        f = compile_graph(g, ([v for v in names], outputs), options, held=held)
        (shape,) = results
        resident = Resident(f, self._where, changed)
        for k, t in enumerate(resident.types[:n] if held else ()):
            if self._lies[k] is None and (k in changed or g.inputs[k].uses):
                self._lies[k], self._held[k] = t, packed(self._held[k], t)
        return resident, Traced(g, shape, found.dtypes[n:])

    @property
    def programs(self) -> list[Executable]:
        """What was compiled so far; `step.programs[-1].report` says what it does."""
        return [resident.f for resident, _ in self._programs.values()]

    def profile(self, *batch: Any, repeats: int | None = None) -> Profile:
        """Profile an iteration on a batch by kernel, as a printable table. The state stays as it is.

        Args:
            *batch: as in a call.
            repeats: measured iterations; None: as many as fit into a second, 10 to 1000.
        """
        if self._out:
            self._take_back()
        self._read_numbers()
        (resident, _), buffers = self._prepared(batch, self._turn())
        state = [self._array(n).numpy() for n in self._names]
        others = [moved_to(b, HOST) for b in (self._vector, *buffers)]
        return resident.f.profile(*state, *others, repeats=repeats)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """The number of updates so far; those that dynamic loss scaling skipped do not count."""
        return int(self._value(STEP))

    @property
    def params(self) -> Any:
        """The parameters now: the tree that the step was made with, or the module."""
        i = self._iteration
        if i.module is not None:
            return i.module.module
        assert i.tree is not None
        return unflatten(i.tree, [self._array(PARAMS + p.name) for p in i.parameters])

    def state_dict(self) -> dict[str, Array]:
        """All arrays of the state by name: `params.w`, `optimizer.w.exp_avg`, `step`, `key` and so on."""
        calls = asarray(np.int64(self._calls))
        return {**{n: self._array(n) for n in self._names}, "calls": calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, to the bit.

        Raises:
            InputError: an array is missing or not the step's, or has another shape or dtype; then everything is as it
                was.
        """
        missing = [n for n in (*self._names, "calls") if n not in state]
        if missing:
            raise InputError(
                f"load_state_dict: there is no {', '.join(missing[:5])} in the state; it was saved by a step with "
                "other parameters or options"
            )
        unexpected = [n for n in state if n not in self._place and n != "calls"]
        if unexpected:
            raise InputError(
                f"load_state_dict: there is {', '.join(unexpected[:5])} in the state, which this step does not have; "
                "it was saved by a step with other parameters or options"
            )
        made = []
        for name in self._names:
            made.append(self._fitting(name, asarray(state[name])))
        evaluate(*made)
        self._held = [self._own(k, a) for k, a in enumerate(made)]
        self._out.clear()
        self._release()
        self._calls = int(asarray(state["calls"]))
        self._lend()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state and the hyperparameters to an .npz or .safetensors file, which is replaced at once."""
        groups = [{n: g[n] for n in g if n in self.optimizer.defaults} for g in self.optimizer.param_groups]
        save_arrays(path, {"state": self.state_dict(), "groups": groups})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on where a step was saved, to the bit. ArtifactError: the file is of something else."""
        found = load_arrays(path)
        if not isinstance(found, dict) or set(found) != {"state", "groups"}:
            raise ArtifactError(f"load: {path} holds no training step; dnnc.load_arrays reads it")
        groups = self.optimizer.param_groups
        if len(found["groups"]) != len(groups):
            raise InputError(f"load: {path} has {count(len(found['groups']), 'group')}, the optimizer {len(groups)}")
        self.load_state_dict(found["state"])
        for own, g in zip(groups, found["groups"]):
            own.update(g)

    def _fitting(self, name: str, a: Array) -> Array:
        shape, dtype = self._types[self._place[name]]
        if a.shape != shape or a.dtype != dtype:
            raise InputError(f"train_step: {name} is {a.dtype} {a.shape}, expected {dtype} {shape}")
        return a

    def _own(self, k: int, a: Array) -> Any:
        """A copy of an array where the step runs, as the state lies."""
        data = moved_to(a._buffer(), self._where)
        if isinstance(data, DeviceData):
            return data.place.copied(data)
        lies = self._lies[k]
        return np.array(data, order="C") if lies is None or lies.row_major else packed(data, lies)

    def _array(self, name: str) -> Array:
        k = self._place[name]
        return Array((self._copied(k),), self._types[k][1])

    def _value(self, name: str) -> Any:
        return self._array(name)._contents()

    def _copied(self, k: int) -> Lazy:
        """An array of the state as a value, which stays as it is when the next step comes."""
        data = self._held[k]
        if isinstance(data, DeviceData):
            return leaf(data.place.copied(data), self._where)
        lies = self._lies[k]
        return leaf(data.copy() if lies is None or lies.row_major else unpacked(data, lies), self._where)

    def _shown(self, k: int) -> Lazy:
        """The same for an array of a module."""
        self._out.append(k)
        return self._copied(k)

    def _take_back(self) -> None:
        """Take what was written into arrays of a module, and let them stand for the state again."""
        written = [k for k in self._out if self._lent[k].written]
        for k in written:
            self._held[k] = self._own(k, self._fitting(self._names[k], self._lent[k].owner))
        if written:
            self._release()
        self._out.clear()
        self._lend()

    def _release(self) -> None:
        for resident, _ in self._programs.values():
            resident.release()

    def _lend(self) -> None:
        """Let the arrays of a module stand for what the state holds."""
        module = self._iteration.module
        if module is None:
            return
        for kind, arrays, requires in (("params.", module.parameters, True), ("buffers.", module.buffers, False)):
            for name, a in arrays.items():
                if not isinstance(a._parts, Held):
                    k = self._place[kind + name]
                    self._lent[k] = held = Held(a, lambda k=k: self._shown(k), requires)  # type: ignore[misc]
                    a._parts, a._pairs = held, None  # type: ignore[assignment]


def form_of(tree: Tree) -> Any:
    """The structure of a batch as a key."""
    if isinstance(tree, Branch) and tree.type in (tuple, list, dict):
        names = tree.names if tree.type is dict else ()
        return tree.type, names, tuple([form_of(c) for c in tree.children])
    return True if isinstance(tree, Leaf) else tree


def draws(g: Graph, key: Value) -> bool:
    """Does a traced step draw random numbers? `key`: that of the next call, some of the words of which draws have the
    others.
    """
    words = key
    while words.node is not None and (first := words.node.inputs[0]) is not None and first.node is not None:
        words = first
    return sum(v is words for node in g.nodes() for v in node.inputs) > 1


def home_of(options: CompileOptions) -> str:
    """The device of the state, that of the target; the host where `dnnc.array` has no arrays on such devices."""
    target = parse_target(options.target)
    try:
        return device_name(f"{target.kind}:{target.device}")
    except ValueInputError:
        return HOST


def _is_plain(x: Any) -> bool:
    """Is it an array that programs read as it is?"""
    return type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.isnative and x.dtype.kind != "c"


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    params: Any,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    loss_scale: float | str | None = None,
    statistics: str | None = None,
    seed: int = 0,
    **options: Unpack[JitOptions],
) -> TrainStep:
    """Compile a training iteration: forward, backward, clipping and update are one program.

    The result holds parameters and optimizer state, which never leave the device: `loss = step(x, y)`.

    Args:
        loss_fn: `loss_fn(params, *batch)`, or `loss_fn(module, *batch)`, gives a real float number, or a pair of it and
            further results. With an argument `key` it gets a key of random numbers, uint32[2], another one in each
            call; draws of `dnnc.random` without a key take keys of that one.
        optimizer: of `dnnc.optim`; made without parameters, or with those of the module.
        params: the first parameters, a tree of float arrays, which stay as they are; or a module, whose arrays are
            those of the step from now on.
        clip_norm: the largest norm of all gradients together; see `dnnc.optim.clip_grad_norm_`.
        clip_value: the largest magnitude of an element of a gradient; before `clip_norm`.
        accumulate: number of calls that share an update, by the mean of their gradients.
        loss_scale: factor of the loss ahead of the backward pass; gradients are divided by it. A number, or "dynamic":
            halved where a gradient overflows, which skips the update, and doubled after 2,000 updates without one.
        statistics: "cheap" computes the largest magnitude, the mean and the saturation of each gradient and of the
            results of products and convolutions, in `step.statistics`. "check" also raises NonFiniteError after a call
            in which one is infinite or NaN, and so waits for each step.
        seed: of the keys.
        **options: see CompileOptions.

    Raises:
        InputError: an option cannot be, or a parameter is no array of floats.
        GradientError: at the first call; see `dnnc.value_and_grad`.
    """
    checks.function(loss_fn, "train_step")
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"train_step: expected an optimizer of dnnc.optim, got {a_type(optimizer)}")
    accumulate = checks.integer(accumulate, "accumulate", 1)
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise InputError(f"train_step: {name}={value!r}, expected a positive number or None")
    number = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool) and loss_scale > 0
    if loss_scale not in (None, "dynamic") and not number:
        raise InputError(f'train_step: loss_scale={loss_scale!r}, expected a positive number, "dynamic" or None')
    if statistics not in (None, "cheap", "check"):
        raise InputError(f'train_step: statistics={statistics!r}, expected "cheap", "check" or None')
    seed = checks.integer(seed, "seed", 0)
    module = BoundModule(params) if is_module(params) else None
    tree: Tree | None = None
    if module is None:
        leaves, tree = flatten(params, "", Rules())
        named = {path or "param": asarray(x) for path, x in leaves}
    else:
        named = module.parameters
    if not named:
        raise InputError("train_step: there are no parameters")
    for name, a in named.items():
        if a.dtype.kind != "f" and a.dtype.name not in NARROW:
            raise InputError(f"train_step: parameter {name} is {a.dtype}, expected real floats")
    groups = _groups(optimizer, named)
    parameters = tuple(Parameter(n, groups[n], k) for k, n in enumerate(named))
    iteration = Iteration(
        loss_fn, optimizer, parameters, tree, module, clip_norm, clip_value, accumulate, loss_scale, statistics,
    )  # fmt: skip
    return TrainStep(iteration, list(named.values()), make_options(options), seed)


def _groups(optimizer: Optimizer, named: Mapping[str, Array]) -> dict[str, int]:
    """The group of each parameter, by identity where the optimizer has arrays, else by name."""
    known = {id(p): k for k, g in enumerate(optimizer.param_groups) for p in g["params"] if isinstance(p, Array)}
    if not known:
        return {n: optimizer.group_of(n) for n in named}
    for name, a in named.items():
        if id(a) not in known:
            raise InputError(
                f"train_step: the optimizer does not have parameter {name}; make it without parameters, or with all of "
                "the module's"
            )
    return {n: known[id(a)] for n, a in named.items()}
