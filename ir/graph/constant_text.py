"""Data of constants: small arrays as literals inside graph text, large ones in an .npz file keyed by content hash."""

from __future__ import annotations

import ast
import json
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dnnc.ir.dtype import BY_NAME, DType, from_numpy
from dnnc.ir.errors import ModelError
from dnnc.ir.files import replacing
from dnnc.ir.graph.core import Graph
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
INLINE = 8  # elements that are written into the text


def inline(a: Array, dtype: DType) -> str:
    """Return a literal that `read_inline` turns into the same bits; empty if none, or above 8 elements."""
    if a.size > INLINE:
        return ""
    try:
        text = _nested([_scalar(x, dtype) for x in a.ravel()], a.shape)
        back = read_inline(ast.parse(text, mode="eval").body, TensorType(dtype, a.shape))
    except ValueError:
        return ""
    same = list(back.ravel()) == list(a.ravel()) if dtype.kind == "s" else back.tobytes() == a.tobytes()
    return text if same else ""


def _nested(items: list[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return items[0]
    if not items:
        return "[]"
    step = len(items) // shape[0]
    return f"[{', '.join(_nested(items[i : i + step], shape[1:]) for i in range(0, len(items), step))}]"


def _scalar(x: Any, dtype: DType) -> str:
    if dtype.kind == "s":
        if not isinstance(x, str):
            raise ValueError("only text has a literal")
        return repr(str(x))
    if dtype.kind == "c":
        return f"({float(x.real)!r}, {float(x.imag)!r})"
    if dtype.kind in "iu":
        return str(int(x))
    return str(bool(x)) if dtype.kind == "b" else _shortest(x, dtype)


def _shortest(x: Any, dtype: DType) -> str:
    """The shortest decimal that reads back as the same number of this dtype."""
    v = float(x)
    if dtype.bits < 64 and v == v and abs(v) != float("inf"):
        for digits in range(1, 17):
            short = float(f"{v:.{digits}g}")
            with np.errstate(over="ignore"):
                same = dtype.numpy.type(short) == x
            if same:
                return repr(short)
    return repr(v)


def read_inline(node: ast.expr, t: TensorType) -> Array:
    """The array of a literal. ValueError where it does not have the type."""
    a = read_literal(node, t.dtype)
    if a.shape != t.shape and (a.size or 0 not in t.shape):
        raise ValueError(f"expected the elements of {t}, got {a.size} in shape {list(a.shape)}")
    return a.reshape([int(str(d)) for d in t.shape])


def read_literal(node: ast.expr, dtype: DType) -> Array:
    """Return an array of a number or nested lists, whatever its shape. ValueError for a wrong element type."""
    items: list[Any] = []
    shape = _read(node, items, dtype)
    out = np.empty(len(items), dtype.numpy)
    for k, x in enumerate(items):
        if dtype.is_int and not dtype.range[0] <= x <= dtype.range[1]:
            raise ValueError(f"{x} is outside the range of {dtype}")
        out[k] = x
    return out.reshape(shape)


def _read(node: ast.expr, items: list[Any], dtype: DType) -> tuple[int, ...]:
    """Append the elements; returns the shape of the nested lists."""
    if not isinstance(node, ast.List):
        items.append(_number(node, dtype))
        return ()
    inner = {_read(x, items, dtype) for x in node.elts}
    if len(inner) > 1:
        raise ValueError("the nested lists have different lengths")
    return (len(node.elts), *(inner.pop() if inner else ()))


def _number(node: ast.expr, dtype: DType) -> Any:
    if dtype.kind == "c" and isinstance(node, ast.Tuple) and len(node.elts) == 2:
        return complex(*(_number(x, BY_NAME["f64"]) for x in node.elts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, dtype)
    if isinstance(node, ast.Name) and node.id in ("inf", "nan") and dtype.kind == "f":
        return float(node.id)
    wanted = {"f": (int, float), "i": (int,), "u": (int,), "b": (bool,), "s": (str,), "c": ()}[dtype.kind]
    if not isinstance(node, ast.Constant) or type(node.value) not in wanted:
        raise ValueError(f"{ast.unparse(node)} is no element of a {dtype} constant")
    return node.value


# --- the side file ----------------------------------------------------------------------------------------------------


def save_constants(g: Graph, path: str | Path) -> None:
    """Write the constants that the text of g does not hold, those of its subgraphs included, to an .npz file."""
    with replacing(path) as f:
        write_constants(g, f)


def write_constants(g: Graph, file: BinaryIO) -> None:
    """Write what `save_constants` writes to an open file."""
    arrays = {f"{digest}:{dtype}": _plain(a, dtype) for digest, (dtype, a) in large_constants(g).items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]


def large_constants(g: Graph) -> dict[str, tuple[DType, Array]]:
    """The constants that the text of g does not hold, those of its subgraphs included, by content hash."""
    out = {g.digest(v): (v.type.dtype, a) for v, a in g.constants.items() if not inline(a, v.type.dtype)}
    for n in g.nodes():
        for s in n.subgraphs():
            out.update(large_constants(s))
    return out


def to_bytes(a: Array, dtype: DType) -> Array:
    """The elements as bytes, uint8[n]; `from_bytes` reads them back."""
    return np.ascontiguousarray(_plain(a, dtype)).reshape(-1).view(np.uint8)


def from_bytes(data: Any, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return the array that `to_bytes` wrote, without a copy for numbers. ValueError for foreign bytes."""
    if dtype.kind == "s":
        a = _typed(np.frombuffer(data, np.uint8), dtype)
        if a.shape != shape:
            raise ValueError(f"expected text in shape {list(shape)}, got {list(a.shape)}")
        return a
    flat = np.frombuffer(data, dtype.numpy) if len(data) else np.empty(0, dtype.numpy)
    return flat.reshape(shape)


def _plain(a: Array, dtype: DType) -> Array:
    """Types that .npy files do not know as bytes (last axis) or, for strings, as JSON."""
    if dtype.kind == "s":
        if not all(isinstance(x, str) for x in a.ravel()):
            raise TypeError("a string constant holds something that is no text and cannot be saved")
        return np.frombuffer(json.dumps([list(a.shape), list(map(str, a.ravel()))]).encode(), np.uint8)
    if a.dtype.isbuiltin == 1:
        return a
    return np.ascontiguousarray(a)[..., None].view(np.uint8)


def load_constants(path: str | Path) -> dict[str, Array]:
    """The arrays of a file that `save_constants` wrote, by content hash: what `parse(text, constants=...)` takes. Any
    other .npz gives its arrays by their names, which `parse` takes as well. ModelError for a damaged file.
    """
    out: dict[str, Array] = {}
    try:
        with np.load(path, allow_pickle=False) as z:
            for key in z.files:
                name, colon, dtype = key.rpartition(":")
                known = colon and dtype in BY_NAME
                out[name if known else key] = _typed(z[key], BY_NAME[dtype]) if known else z[key]
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as e:
        raise ModelError(f"{path} holds no constants that can be read: {e}; save_constants writes such files") from None
    return out


def _typed(a: Array, dtype: DType) -> Array:
    if dtype.kind == "s":
        shape, items = json.loads(a.tobytes().decode())
        out = np.empty(len(items), object)
        out[:] = items
        return out.reshape(shape)
    if from_numpy(a.dtype) is dtype:
        return a
    return a.view(dtype.numpy)[..., 0]
