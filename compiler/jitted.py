"""`@dnnc.jit`: array code compiled at its call, once per structure, dtype and shape of its arguments."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import numpy as np

from dnnc.array.core import Array, evaluate, from_data
from dnnc.array.creation import borrowed
from dnnc.array.devices import HOST, DeviceData, common, moved_to, place
from dnnc.array.expressions import started_directly
from dnnc.array.lazy import recording
from dnnc.array.promotion import real_of
from dnnc.compile_graph import compile_graph, open_dims
from dnnc.frontends.trace import Spec, is_traced, traced, tracing
from dnnc.frontends.trace.tracer import Traced
from dnnc.ir import checks
from dnnc.ir.errors import InputError, a_type, count
from dnnc.ir.lru import LRU
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions, JitOptions, make_options
from dnnc.parameters import flat
from dnnc.pytree import FIXED, Branch, Fixed, Rules, Tree, flatten, key_of, unflatten
from dnnc.roles import Roles

if TYPE_CHECKING:
    from typing_extensions import Unpack


Result = TypeVar("Result")
PROGRAMS = 64  # kept by one function
BUFFERS = frozenset((np.ndarray, DeviceData))  # what programs take as it is


class Jitted(Generic[Result]):
    """A compiled function; see `jit`. `traces` counts how often it was traced.

    Type checkers see the function's result. Its arguments may be arrays of other libraries, so they are not checked.
    """

    def __init__(
        self,
        fn: Callable[..., Result],
        static: Sequence[str],
        options: CompileOptions,
        programs: int,
        dynamic: Mapping[str, Mapping[int, str]],
        roles: Roles | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._dynamic, self._roles = dynamic, roles
        self._fn, self._signature, self._static = fn, inspect.signature(fn), frozenset(static)
        plain = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = self._signature.parameters
        self._plain = tuple(parameters) if all(p.kind in plain for p in parameters.values()) else None
        fixed = all(
            p.default is p.empty or isinstance(p.default, FIXED) for p in parameters.values()
        )  # lists and arrays may change between calls
        self._direct = fixed and not static and not dynamic and roles is None
        self._arrays: dict[
            int, tuple[Tree, list[str]]
        ] = {}  # what is around so many arrays, given by position, and their paths
        self._options = options
        self._programs: LRU[Any, tuple[Any, Traced]] = LRU(programs)
        self._lock = threading.RLock()
        self.traces = 0
        for what, given in (("static", self._static), ("dynamic", {p.partition(".")[0] for p in dynamic})):
            unknown = sorted(given - set(self._signature.parameters))
            if not unknown:
                continue
            raise InputError(
                f"{what}: {fn.__name__} has no argument {', '.join(unknown)}; it has "
                f"{', '.join(self._signature.parameters)}"
            )

        if roles is not None:
            roles.check(list(self._signature.parameters))

    def __repr__(self) -> str:
        return (
            f"<dnnc.jit of {self._fn.__name__}{self._signature}"[:150] + f", {count(len(self._programs), 'program')}>"
        )

    def __reduce__(self) -> Any:
        """Pickle by name, as functions are: the module's function. Programs are compiled where it is called."""
        found: Any = sys.modules.get(self._fn.__module__)
        for name in self._fn.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is self:
            return self._fn.__qualname__
        if found is not self._fn or self._roles is not None:
            raise InputError(
                f"{self._fn.__qualname__} cannot be pickled: pickles hold functions by name, and {self._fn.__module__} "
                "has no such function under "
                f"dnnc.jit; decorate it at the top of a module, or use dnnc.compile and f.save(path)"
            )
        return _again, (
            self._fn,
            tuple(self._static),
            self._options,
            self._programs.most,
            {p: dict(a) for p, a in self._dynamic.items()},
        )

    def __copy__(self) -> Jitted[Result]:
        return self

    def __deepcopy__(self, memo: Any) -> Jitted[Result]:
        return self  # as of functions

    @overload
    def __get__(self, owner: None, kind: type) -> Jitted[Result]: ...
    @overload
    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Result]: ...
    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if tracing():
            return self._fn(*args, **kwargs)  # a part of the program that is being traced
        usual = self._usual(args) if not kwargs else None
        if usual is not None:
            key, paths, buffers = usual
            program, result = self._program(key, paths, lambda: [Spec(a.shape, a.dtype) for a in buffers], buffers)
            if result.tracked:
                return self._fn(*args)
            return _restored(result, program(*buffers) if program is not None else ())  # type: ignore[no-any-return]
        leaves, tree = self._flat(self._arguments(args, kwargs))
        arrays = [_array(x) for _, x in leaves]
        if any(is_traced(a) for a in arrays):
            raise InputError(
                f"{self._fn.__name__}: an argument belongs to a function whose trace has ended; give its results back "
                "by return"
            )
        lazy = [a for a in arrays if isinstance(a, Array)]
        if any(p.tracked for a in lazy for p in a._parts) and recording():
            return self._fn(*args, **kwargs)  # `backward` needs the history; the program is one all the same
        if lazy:
            evaluate(*lazy)
        where = common(self._fn.__name__, [_device(a) for a in arrays])
        made = [_buffer(a, where) for a in arrays]
        shapes = self._open([n for n, _ in leaves], arrays) if self._dynamic else [a.shape for a in arrays]
        key = tree, tuple((a.dtype, s) for a, s in zip(arrays, shapes)), where, recording()
        paths = [n for n, _ in leaves]
        program, result = self._program(key, paths, lambda: [Spec(s, a.dtype) for s, a in zip(shapes, arrays)], made)
        if result.tracked:
            return self._fn(*args, **kwargs)
        if self._roles is None or program is None:
            return _restored(result, program(*made) if program is not None else ())  # type: ignore[no-any-return]
        return _restored(result, self._roles.run(program, paths, arrays, made, [x for _, x in leaves]))  # type: ignore[no-any-return]

    def _usual(self, args: tuple[Any, ...]) -> tuple[Any, Sequence[str], list[Any]] | None:
        """The key, the paths and the buffers of a call with arrays of real numbers by position and nothing else, all
        there and on one device, as most calls are: a third of the usual time. None of other calls.
        """
        if not self._direct or not args:
            return None
        buffers, types, where = [], [], None
        for a in args:
            device: str | None = HOST
            if type(a) is Array and len(a._parts) == 1:
                part = a._parts[0]
                if part.tracked:
                    return None
                device, a = part.device, part.data
            where = where or device
            if (
                type(a) not in BUFFERS
                or device is None
                or device != where
                or a.dtype.kind == "c"
                or not a.dtype.isnative
            ):
                return None
            buffers.append(a)
            types.append((a.dtype, a.shape))
        known = self._arrays.get(len(args))
        if known is None:
            leaves, tree = self._flat(self._arguments(args, {}))
            known = self._arrays[len(args)] = tree, [path for path, _ in leaves]
        tree, paths = known
        return (tree, tuple(types), where, recording()), paths, buffers

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._plain is not None and not kwargs and len(args) == len(self._plain):  # what is usual, quickly
            return dict(zip(self._plain, args))
        bound = self._signature.bind(*args, **kwargs)  # TypeError as of a call
        bound.apply_defaults()
        return bound.arguments

    def refit(self) -> None:
        """Bind parameter arrays anew at the next call, since their owner wrote into them. Compiles nothing."""
        with self._lock:
            for program, _ in self._programs.values():
                if self._roles is not None and program is not None:
                    program.stale = True

    def _flat(self, arguments: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], Tree]:
        """The arrays of a call by their paths, and what is around them."""
        leaves: list[tuple[str, Any]] = []
        trees: list[Tree] = []
        for name, value in arguments.items():
            if name in self._static:
                trees.append(Fixed(key_of(value, name), value))
                continue
            found, tree = flatten(value, name, Rules())
            leaves += found
            trees.append(tree)
        return leaves, Branch(dict, tuple(arguments), tuple(trees))

    def _open(self, paths: Sequence[str], arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return shapes with names for open sizes. Sizes of 0 stay numbers: such programs need elements."""
        for p in self._dynamic:
            if p not in paths:
                raise InputError(
                    f"dynamic: {self._fn.__name__} was called without an array {p}; there are "
                    f"{', '.join(paths) or 'none'}"
                )
        shapes: list[tuple[Any, ...]] = []
        sizes: dict[str, int] = {}
        for path, a in zip(paths, arrays):
            shape: list[Any] = list(a.shape)
            for axis, name in self._dynamic.get(path, {}).items():
                if not -len(shape) <= axis < len(shape):
                    raise InputError(f"dynamic: {path} has shape {a.shape}, and no axis {axis}")
                n = a.shape[axis]
                if sizes.setdefault(name, n) != n:
                    raise InputError(
                        f"{self._fn.__name__}: {name} is {sizes[name]}, but axis {axis} of {path} is {n}; dynamic= "
                        "says that they are equal"
                    )
                shape[axis] = name
            shapes.append(tuple(shape))
        return [a.shape for a in arrays] if 0 in sizes.values() else shapes

    def _program(
        self, key: Any, names: Sequence[str], specs: Callable[[], list[Spec]], buffers: Sequence[Any]
    ) -> tuple[Any, Traced]:
        with self._lock:
            found = self._programs.find(key)
            if found is not None:
                return found
            self.traces += 1
            if self._roles is not None:
                self._roles.contents()  # the trace is to see their memory, not how it comes about
            form = Branch(tuple, (0, 1), (Branch(tuple, (0,), (key[0],)), Branch(dict, (), ())))
            result = traced(self._called, form, specs(), _names(names))
            result.graph.name = self._fn.__name__ if self._fn.__name__.isidentifier() else "traced"
            g = result.graph
            labels = [v.name for v in g.inputs], [v.name for v in g.outputs]
            if result.tracked and recording() and self._roles is None:
                self._programs[key] = None, result  # its history is wanted, and its contents may change
                return None, result
            result = replace(result, tracked=False)
            made, options = None, open_dims(self._for(key[2]), g)
            if g.outputs:
                made = (
                    compile_graph(g, labels, options)
                    if self._roles is None
                    else self._roles.compile(g, labels, names, buffers, options)
                )
            if self._roles is None and key[2] not in (None, HOST) and made is not None:
                made = quickly(made, str(key[2]))
            self._programs[key] = made, result
            return made, result

    def _for(self, device: str | None) -> CompileOptions:
        """The options, for the device of the arguments; those on the host go wherever the options say."""
        target = parse_target(self._options.target)
        if device in (None, HOST) or f"{target.kind}:{target.device}" == device:
            return self._options
        return replace(self._options, target=str(device), dims=dict(self._options.dims))

    def _called(self, arguments: dict[str, Any]) -> Any:
        again = inspect.BoundArguments(self._signature, OrderedDict(arguments))
        return self._fn(*again.args, **again.kwargs)


def _again(fn: Callable[..., Result], *settings: Any) -> Jitted[Result]:
    return Jitted(fn, *settings)


def quickly(program: Any, device: str) -> Any:
    """A program that takes arrays of dnnc on a device; with less around the launches where it has few kernels."""

    return started_directly(program, place(device)) or program


def _names(paths: Sequence[str]) -> list[str]:
    return [p.replace(".", "_") for p in paths]


def _array(x: Any) -> Any:
    """An argument as an array, its numbers in the machine's byte order."""
    if isinstance(x, np.ndarray):
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if isinstance(x, Array):
        return x
    return borrowed(x)


def _device(a: Any) -> str | None:
    return a._parts[0].device if isinstance(a, Array) else HOST


def _buffer(a: Array | np.ndarray[Any, Any], device: str | None) -> np.ndarray[Any, Any] | DeviceData:
    """The contents as a program on a device takes them: complex numbers as pairs."""
    if isinstance(a, Array):
        return moved_to(a._buffer(), device or HOST)
    if a.dtype.kind != "c":
        return a
    return np.ascontiguousarray(a).reshape(*a.shape, 1).view(real_of(a.dtype))


def _restored(result: Traced, made: Any) -> Any:
    many = made if isinstance(made, (tuple, list)) else (made,)
    arrays = [from_data(m, d) for m, d in zip(many, result.dtypes)]
    return unflatten(result.results, arrays)


def open_sizes(dynamic: Any) -> dict[str, dict[int, str]]:
    """`dynamic=` of `jit` as names of sizes by argument and axis. InputError where it is something else."""
    example = 'expected names of sizes by argument and axis, such as {"x": {0: "n"}}'
    if dynamic is None:
        return {}
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(a, str) and isinstance(axes, Mapping) for a, axes in dynamic.items()
    ):
        raise InputError(f"dynamic={dynamic!r}: {example}")
    for axes in dynamic.values():
        for axis, name in axes.items():
            if isinstance(axis, bool) or not isinstance(axis, int) or not isinstance(name, str):
                raise InputError(f"dynamic={dynamic!r}: {example}")
    return {a: dict(axes) for a, axes in dynamic.items()}


class Decorator(Protocol):
    """`dnnc.jit(...)` with options and without a function."""

    def __call__(self, fn: Callable[..., Result], /) -> Jitted[Result]: ...


@overload
def jit(
    fn: None = None,
    /,
    *,
    static: str | Sequence[str] = (),
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    donate: str | Sequence[str] = (),
    parameters: str | Sequence[str] | Mapping[str, Any] = (),
    programs: int = PROGRAMS,
    **options: Unpack[JitOptions],
) -> Decorator: ...
@overload
def jit(
    fn: Callable[..., Result],
    /,
    *,
    static: str | Sequence[str] = (),
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    donate: str | Sequence[str] = (),
    parameters: str | Sequence[str] | Mapping[str, Any] = (),
    programs: int = PROGRAMS,
    **options: Unpack[JitOptions],
) -> Jitted[Result]: ...
def jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    static: str | Sequence[str] = (),
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    donate: str | Sequence[str] = (),
    parameters: str | Sequence[str] | Mapping[str, Any] = (),
    programs: int = PROGRAMS,
    **options: Unpack[JitOptions],
) -> Any:
    """Compile a function of array code when it is called: `@dnnc.jit`, or `@dnnc.jit(static=("n",), threads=1)`.

    Args:
        fn: takes and gives arrays, or dicts, lists, tuples and dataclasses of arrays. Numbers and strings among its
            arguments are fixed: another value is another program.
        static: names of arguments that are passed on as they are; they must be hashable.
        dynamic: sizes for which one program serves all, as names by argument and axis: `{"x": {0: "n"}, "params.w": {1:
            "k"}}`. Sizes of one name are equal.
        donate: names of arguments whose memory results of the same types take, the first that fit. Arrays of
            `dnnc.array` given for them are dead afterwards; of NumPy's, CuPy's and torch's the memory holds the
            results.
        parameters: names of arguments that seldom are other arrays, such as weights: they are packed when they are, and
            not in each call. After writing into an array of NumPy call `refit()` of the function. Or a dict of arrays
            that the function captures, by any names.
        programs: how many are kept; those of structures, dtypes, shapes and fixed values used last.
        **options: see CompileOptions.

    Returns:
        A function that takes arrays of NumPy, `dnnc.array` or DLPack and gives arrays of `dnnc.array`. The device of
        the arguments decides where it runs; arrays on the host go to `target`. Within a function that is traced it is a
        part of that one's program.

    Raises:
        InputError: `static` or `dynamic` names no argument, or an option is unknown.
    """
    opts = make_options(options)
    names = checks.names(static, "static")
    programs = checks.integer(programs, "programs", 1)
    sizes = open_sizes(dynamic)
    captured = flat(parameters) if isinstance(parameters, Mapping) else {}
    given = checks.names(donate, "donate")
    bound = () if isinstance(parameters, Mapping) else checks.names(parameters, "parameters")

    def made(f: Callable[..., Result]) -> Jitted[Result]:
        checks.function(f, "jit")
        if not hasattr(f, "__name__"):
            raise InputError(f"jit: expected a function, got {a_type(f)}; pass its method, such as obj.__call__")
        roles = Roles(f.__name__, frozenset(given), frozenset(bound), captured) if given or bound or captured else None
        return Jitted(f, names, opts, programs, sizes, roles)

    return made if fn is None else made(fn)
