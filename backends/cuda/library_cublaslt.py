"""Matrix products by cuBLASLt through ctypes: a Product -> descriptors, a suggestion, and a call.

cuBLASLt counts by columns. A matrix whose rows follow each other in memory is to it the transposed one, so y = x @ w is
asked for as y' = w' @ x': the first operand is w, and a bias along the columns of y is one along the rows of y', which
is what its epilogue has. Its numbers below are those of cublasLt.h, where they are the same since CUDA 12.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dnnc.backends.cuda.library import ALIGN, PLANS, WORKSPACE, CallFunction, LibraryCall, Matrix, Product, described
from dnnc.ir.errors import InternalError, TargetError

TYPES = {"f32": 0, "f16": 2, "i8": 3, "i32": 10, "bf16": 14, "f8e4m3fn": 28, "f8e5m2": 29}  # cudaDataType_t
COMPUTE = {"f32": 68, "tf32": 77, "i32": 72}  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32I
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8  # CUBLASLT_MATMUL_DESC_...
BATCH_COUNT, BATCH_STRIDE = 5, 6  # CUBLASLT_MATRIX_LAYOUT_...
MAX_WORKSPACE, REDUCTIONS, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_...
IN_FLOAT32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a sum are not added up in the type of the result
AFTER = {"": 0, "relu": 2, "gelu": 32}
BIAS, PLAIN = 4, 1  # CUBLASLT_EPILOGUE_BIAS, _DEFAULT
NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED
SOME_ADDRESS = (1 << 20) + ALIGN  # of a bias that is not there yet: suggestions depend on how it is aligned


class Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def layouts(p: Product) -> list[tuple[int, int, int, int, int, int]]:
    """Type, rows, columns, leading dimension and batch stride (elements) of w', x' and y' for such batches."""

    def one(of: Matrix, kind: str, rows: int, cols: int) -> tuple[int, int, int, int, int, int]:
        """A matrix [rows, cols] as it lies in memory, counted by columns."""
        high, wide = (rows, cols) if of.transposed else (cols, rows)
        return TYPES[kind], high, wide, of.step, of.batch_step, p.batch

    return [one(p.w, p.types[0], p.k, p.n), one(p.x, p.types[0], p.m, p.k), one(p.y, p.types[1], p.m, p.n)]


def attributes(p: Product) -> list[tuple[int, Any]]:
    """Of the operation: by number. A matrix whose rows follow each other is the transposed one already."""
    epilogue = AFTER[p.after] | (BIAS if p.bias >= 0 else 0) or PLAIN
    return [
        (TRANSA, ctypes.c_int32(p.w.transposed)),
        (TRANSB, ctypes.c_int32(p.x.transposed)),
        (EPILOGUE, ctypes.c_int32(epilogue)),
    ]


class Lt:
    """The library with a handle on the device that is current. Calls may come from several threads."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.handle = ctypes.c_void_p()
        self.check(library.cublasLtCreate(ctypes.byref(self.handle)), "cublasLtCreate")

    def check(self, status: int, what: str) -> None:
        if status:
            name = self.library.cublasLtGetStatusName(ctypes.c_int(status)).decode()
            raise InternalError(
                f"{what} fails with {name} ({status}); the environment variable CUBLASLT_LOG_LEVEL=5 makes cuBLASLt "
                "say why"
            )

    def make(self, kind: str, *args: Any) -> tuple[ctypes.c_void_p, Callable[[], Any]]:
        """An object of the library, and what ends it."""
        made = ctypes.c_void_p()
        self.check(getattr(self.library, f"cublasLt{kind}Create")(ctypes.byref(made), *args), f"cublasLt{kind}Create")
        destroy = getattr(self.library, f"cublasLt{kind}Destroy")
        return made, lambda: destroy(made)

    def set(self, kind: str, of: ctypes.c_void_p, number: int, v: Any) -> None:
        status = getattr(self.library, f"cublasLt{kind}SetAttribute")(
            of, number, ctypes.byref(v), ctypes.c_size_t(ctypes.sizeof(v))
        )
        self.check(status, f"cublasLt{kind}SetAttribute({number})")


class LtFunction(CallFunction):
    """A product that is ready to be computed on a device.

    Args:
        lt: the library on the device.
        call: what to compute, by which of its suggestions.

    TargetError: the library has no such suggestion here.
    """

    def __init__(self, lt: Lt, call: LibraryCall) -> None:
        assert isinstance(call.work, Product)
        self.lt, self.product = lt, call.work
        ends: list[Callable[[], Any]] = []
        self._end = weakref.finalize(self, _end, ends)
        self._end.atexit = False
        self._lock = threading.Lock()  # the address of the bias is part of the descriptor
        p = call.work
        scale = TYPES["i32" if p.math == "i32" else "f32"]
        self.operation = self._made(ends, "MatmulDesc", ctypes.c_int(COMPUTE[p.math]), ctypes.c_int(scale))
        for number, v in attributes(p):
            lt.set("MatmulDesc", self.operation, number, v)
        if p.bias >= 0:
            lt.set("MatmulDesc", self.operation, BIAS_POINTER, ctypes.c_uint64(SOME_ADDRESS))
        self.layouts = [self._layout(ends, *of) for of in layouts(p)]
        self.suggestion = self._suggested(ends, call)
        self.workspace_bytes = int(self.suggestion.workspace)

    def _made(self, ends: list[Callable[[], Any]], kind: str, *args: Any) -> ctypes.c_void_p:
        made, end = self.lt.make(kind, *args)
        ends.append(end)
        return made

    def _layout(
        self, ends: list[Callable[[], Any]], kind: int, rows: int, cols: int, step: int, batch_step: int, batch: int
    ) -> ctypes.c_void_p:
        made = self._made(
            ends, "MatrixLayout", ctypes.c_int(kind), ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(step)
        )
        if batch > 1:
            self.lt.set("MatrixLayout", made, BATCH_COUNT, ctypes.c_int32(batch))
            self.lt.set("MatrixLayout", made, BATCH_STRIDE, ctypes.c_int64(batch_step))
        return made

    def _suggested(self, ends: list[Callable[[], Any]], call: LibraryCall) -> Suggestion:
        """The suggestion that is asked for. As many are asked for in any case, for their order may depend on that."""
        wishes = self._made(ends, "MatmulPreference")
        self.lt.set("MatmulPreference", wishes, MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        self.lt.set("MatmulPreference", wishes, REDUCTIONS, ctypes.c_uint32(IN_FLOAT32))
        for number in MIN_ALIGNMENTS:
            self.lt.set("MatmulPreference", wishes, number, ctypes.c_uint32(ALIGN))
        found, count = (Suggestion * max(PLANS, call.plan + 1))(), ctypes.c_int(0)
        w, x, y = self.layouts
        status = self.lt.library.cublasLtMatmulAlgoGetHeuristic(
            self.lt.handle, self.operation, w, x, y, y, wishes, ctypes.c_int(len(found)), found, ctypes.byref(count)
        )
        if status != NOT_SUPPORTED:
            self.lt.check(status, "cublasLtMatmulAlgoGetHeuristic")
        good = [s for s in found[: count.value] if s.state == 0]
        if status or call.plan >= len(good):
            raise TargetError(f"cuBLASLt suggests {len(good)} ways here, so there is none for {described(call)}")
        return good[call.plan]

    def start(self, launch: Any, args: Sequence[int], stream: int) -> None:
        """See CallFunction."""
        p, lt = self.product, self.lt
        number = ctypes.c_int32 if p.math == "i32" else ctypes.c_float
        one, zero = number(1), number(0)
        x, w, y, workspace = (ctypes.c_void_p(a) for a in (args[p.x.arg], args[p.w.arg], args[p.y.arg], args[-1]))
        at_w, at_x, at_y = self.layouts
        with self._lock:
            if p.bias >= 0:
                lt.set("MatmulDesc", self.operation, BIAS_POINTER, ctypes.c_uint64(args[p.bias]))
            status = lt.library.cublasLtMatmul(
                lt.handle, self.operation, ctypes.byref(one), w, at_w, x, at_x, ctypes.byref(zero), y, at_y, y, at_y,
                ctypes.byref(self.suggestion.algo), workspace, ctypes.c_size_t(self.workspace_bytes),
                ctypes.c_void_p(stream),
            )  # fmt: skip
        lt.check(status, "cublasLtMatmul")


def _end(ends: list[Callable[[], Any]]) -> None:
    for end in reversed(ends):
        end()
