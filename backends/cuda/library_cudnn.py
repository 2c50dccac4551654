"""cuDNN's graph API by ctypes: a Convolution -> an operation graph, a suggestion of cuDNN's, a call.

The graph is the convolution, the addition of the bias and the activation; what is between them is virtual, float32, and
never in memory. Suggestions are those of two heuristics, without what uses tensor cores where products are to be
float32. The numbers below are those of cudnn_graph.h of cuDNN 9.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from dnnc.backends.cuda.library import ALIGN, WORKSPACE, CallFunction, Convolution, Image, LibraryCall, described
from dnnc.ir.errors import InternalError, TargetError, count

# cudnnBackendDescriptorType_t
POINTWISE, CONVOLUTION, ENGINE, CONFIG, HEURISTIC, PLAN = 0, 1, 2, 3, 4, 5
CONVOLUTION_FORWARD, POINTWISE_OPERATION, GRAPH, PACK, TENSOR = 10, 13, 15, 16, 17
# cudnnBackendAttributeType_t with how a value is passed
HANDLE, DATA_TYPE, BOOLEAN, INT64 = (0, ctypes.c_void_p), (1, ctypes.c_int), (2, ctypes.c_bool), (3, ctypes.c_int64)
FLOAT, ADDRESS, CONV_MODE, HEUR_MODE = (4, ctypes.c_float), (6, ctypes.c_void_p), (7, ctypes.c_int), (8, ctypes.c_int)
NOTE, POINTWISE_MODE, DESCRIPTOR = (11, ctypes.c_int), (14, ctypes.c_int), (15, ctypes.c_void_p)
TYPES = {"f32": 0, "f16": 2, "bf16": 9}  # cudnnDataType_t
ADD, RELU = 0, 100  # cudnnPointwiseMode_t
CROSS_CORRELATION = 1
HEURISTICS = (3, 2)  # A, which orders by the times that it expects, then FALLBACK, whose engines do what others do not
ROUNDING = {0, 1}  # cudnnBackendNumericalNote_t: tensor cores, operands of a smaller type
NOTES = 10  # at most, of an engine
MOST = 64  # suggestions of a heuristic
TEXT = 1000  # bytes of an error's text
NOT_SUPPORTED = range(3000, 4000)  # statuses that say so
X, W, Y, BIAS, FIRST_VIRTUAL = 1, 2, 3, 4, 5  # what tensors are called
Kind = tuple[int, Any]
SETTINGS = Sequence[tuple[int, Kind, Sequence[Any]]]  # attributes: number, type, values


class Unsupported(TargetError):
    """The library says that it cannot do something: another of its suggestions may."""


class Descriptor:
    """An object of the library's."""

    def __init__(self, library: Any, kind: int, settings: SETTINGS = ()) -> None:
        self.library, self.kind = library, kind
        self.pointer = ctypes.c_void_p()
        status = library.cudnnBackendCreateDescriptor(ctypes.c_int(kind), ctypes.byref(self.pointer))
        check(library, status, f"a descriptor of kind {kind}")
        self._end = weakref.finalize(self, library.cudnnBackendDestroyDescriptor, self.pointer)
        self._end.atexit = False
        self.kept: list[Any] = [settings]  # descriptors that it refers to
        for number, (code, kind_of), values in settings:
            array = (kind_of * len(values))(*(v.pointer.value if isinstance(v, Descriptor) else v for v in values))
            status = library.cudnnBackendSetAttribute(
                self.pointer, ctypes.c_int(number), ctypes.c_int(code), ctypes.c_int64(len(values)), array
            )
            check(library, status, f"attribute {number}")
        if settings:  # others are filled by the library
            check(library, library.cudnnBackendFinalize(self.pointer), f"a descriptor of kind {kind}")

    def get(self, number: int, kind: Kind, most: int, into: Sequence[Descriptor] = ()) -> list[Any]:
        """An attribute, at most so many of it. `into`: descriptors that take them, where it is made of these."""
        code, kind_of = kind
        array = (kind_of * most)(*(d.pointer.value for d in into))
        count = ctypes.c_int64(0)
        status = self.library.cudnnBackendGetAttribute(
            self.pointer, ctypes.c_int(number), ctypes.c_int(code), ctypes.c_int64(most), ctypes.byref(count), array
        )
        check(self.library, status, f"attribute {number}")
        return list(array[: min(count.value, most)])


def check(library: Any, status: int, what: str) -> None:
    """InternalError, or Unsupported, with what the library says of a status."""
    if not status:
        return
    text = ctypes.create_string_buffer(TEXT)
    library.cudnnGetLastErrorString(text, ctypes.c_size_t(TEXT))
    said = (
        f"{what}: {library.cudnnGetErrorString(ctypes.c_int(status)).decode()} ({status}) "
        f"{text.value.decode(errors='replace')}"
    ).strip()
    if status in NOT_SUPPORTED:
        raise Unsupported(said)
    raise InternalError(
        f"cuDNN fails at {said}; the environment variables CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr make it say "
        "more"
    )


# --- the graph --------------------------------------------------------------------------------------------------------


def tensor(uid: int, kind: str, sizes: Sequence[int], steps: Sequence[int], virtual: bool = False) -> SETTINGS:
    """CUDNN_ATTR_TENSOR_..."""
    return [
        (906, INT64, [uid]),
        (901, DATA_TYPE, [TYPES[kind]]),
        (902, INT64, sizes),
        (903, INT64, steps),
        (900, INT64, [ALIGN]),
        (907, BOOLEAN, [virtual]),
    ]


def window(c: Convolution) -> SETTINGS:
    """CUDNN_ATTR_CONVOLUTION_..."""
    before, after = [p[0] for p in c.pads], [p[1] for p in c.pads]
    head: SETTINGS = [(106, INT64, [2]), (100, DATA_TYPE, [TYPES["f32"]]), (101, CONV_MODE, [CROSS_CORRELATION])]
    return [*head, (105, INT64, before), (104, INT64, after), (103, INT64, c.strides), (102, INT64, c.dilations)]


def stages(c: Convolution) -> list[str]:
    """What the graph does, in order."""
    return ["conv", *(["bias"] if c.bias >= 0 else []), *([c.after] if c.after else [])]


def operations(library: Any, c: Convolution) -> list[Descriptor]:
    """The nodes of the graph: the convolution, then what follows, each of which reads what the one before it made."""

    def image(uid: int, i: Image, kind: str) -> Descriptor:
        return Descriptor(library, TENSOR, tensor(uid, kind, i.sizes, i.steps))

    out: list[Descriptor] = []
    todo = stages(c)
    last: Descriptor | None = None
    for k, stage in enumerate(todo):
        made = (
            image(Y, c.y, c.types[1])
            if k == len(todo) - 1
            else Descriptor(library, TENSOR, tensor(FIRST_VIRTUAL + k, "f32", c.y.sizes, c.y.steps, True))
        )
        if stage == "conv":
            out.append(_conv(library, c, image(X, c.x, c.types[0]), image(W, c.w, c.types[0]), made))
        else:
            assert last is not None
            out.append(_pointwise(library, c, stage, last, made))
        last = made
    return out


def _conv(library: Any, c: Convolution, x: Descriptor, w: Descriptor, y: Descriptor) -> Descriptor:
    conv = Descriptor(library, CONVOLUTION, window(c))
    operands: SETTINGS = [
        (704, DESCRIPTOR, [x]),
        (703, DESCRIPTOR, [w]),
        (705, DESCRIPTOR, [y]),
        (702, DESCRIPTOR, [conv]),
    ]
    return Descriptor(library, CONVOLUTION_FORWARD, [*operands, (700, FLOAT, [1.0]), (701, FLOAT, [0.0])])


def _pointwise(library: Any, c: Convolution, stage: str, x: Descriptor, y: Descriptor) -> Descriptor:
    mode = Descriptor(
        library, POINTWISE, [(0, POINTWISE_MODE, [ADD if stage == "bias" else RELU]), (1, DATA_TYPE, [TYPES["f32"]])]
    )
    operands: list[tuple[int, Kind, Sequence[Any]]] = [
        (750, DESCRIPTOR, [mode]),
        (751, DESCRIPTOR, [x]),
        (753, DESCRIPTOR, [y]),
    ]
    if stage == "bias":
        channels = c.y.sizes[1]
        bias = Descriptor(
            library, TENSOR, tensor(BIAS, c.types[0], (1, channels, 1, 1), (channels, 1, channels, channels))
        )
        operands.append((752, DESCRIPTOR, [bias]))
    return Descriptor(library, POINTWISE_OPERATION, operands)


# --- the call ---------------------------------------------------------------------------------------------------------


class Dnn:
    """The library with a handle on the device that is current. The stream is the handle's, so calls take turns."""

    def __init__(self, library: Any) -> None:
        self.library, self.lock = library, threading.Lock()
        self.handle = ctypes.c_void_p()
        check(library, library.cudnnCreate(ctypes.byref(self.handle)), "cudnnCreate")


class DnnFunction(CallFunction):
    """A convolution that is ready to be computed on a device.

    Args:
        dnn: the library on the device.
        call: what to compute, by which of its suggestions.

    TargetError: the library has no such suggestion here, or cannot do it after all.
    """

    def __init__(self, dnn: Dnn, call: LibraryCall) -> None:
        assert isinstance(call.work, Convolution)
        self.dnn, self.convolution = dnn, call.work
        try:
            self.plan = self._planned(call)
            (self.workspace_bytes,) = self.plan.get(402, INT64, 1)
        except Unsupported as e:
            raise TargetError(f"cuDNN cannot do {described(call)}: {e}") from None
        if self.workspace_bytes > WORKSPACE:
            raise TargetError(
                f"{described(call)} asks for {self.workspace_bytes >> 20} MiB of workspace; there may be "
                f"{WORKSPACE >> 20}"
            )

    def _planned(self, call: LibraryCall) -> Descriptor:
        library, handle = self.dnn.library, self.dnn.handle.value
        nodes = operations(library, self.convolution)
        graph = Descriptor(library, GRAPH, [(801, DESCRIPTOR, nodes), (800, HANDLE, [handle])])
        found = [c for mode in HEURISTICS for c in self._suggested(graph, mode)]
        if call.work.types[0] == "f32" and call.work.math == "f32":
            found = [c for c in found if not self._rounds(c)]
        if call.plan >= len(found):
            raise TargetError(f"cuDNN suggests {count(len(found), 'way')} here, so there is none for {described(call)}")
        plan = Descriptor(library, PLAN, [(401, DESCRIPTOR, [found[call.plan]]), (400, HANDLE, [handle])])
        plan.kept.append(graph)
        return plan

    def _suggested(self, graph: Descriptor, mode: int) -> list[Descriptor]:
        """The configurations of engines that a heuristic suggests for a graph, in its order."""
        heuristic = Descriptor(self.dnn.library, HEURISTIC, [(201, DESCRIPTOR, [graph]), (200, HEUR_MODE, [mode])])
        configs = [Descriptor(self.dnn.library, CONFIG) for _ in range(MOST)]
        return configs[: len(heuristic.get(202, DESCRIPTOR, MOST, configs))]

    def _rounds(self, config: Descriptor) -> bool:
        """Does an engine round float32 operands, as tensor cores do to TF32?"""
        engine = Descriptor(self.dnn.library, ENGINE)
        config.get(300, DESCRIPTOR, 1, [engine])
        return not ROUNDING.isdisjoint(engine.get(1303, NOTE, NOTES))

    def start(self, launch: Any, args: Sequence[int], stream: int) -> None:
        """See CallFunction."""
        c, library = self.convolution, self.dnn.library
        named = {X: c.x.arg, W: c.w.arg, Y: c.y.arg, **({BIAS: c.bias} if c.bias >= 0 else {})}
        operands: SETTINGS = [
            (1000, INT64, list(named)),
            (1001, ADDRESS, [args[k] for k in named.values()]),
            (1003, ADDRESS, [args[-1]]),
        ]
        pack = Descriptor(library, PACK, operands)
        with self.dnn.lock:
            check(library, library.cudnnSetStream(self.dnn.handle, ctypes.c_void_p(stream)), "cudnnSetStream")
            status = library.cudnnBackendExecute(self.dnn.handle, self.plan.pointer, pack.pointer)
            check(library, status, "cudnnBackendExecute")
