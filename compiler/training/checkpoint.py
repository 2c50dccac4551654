"""Checkpoints: trees of arrays and numbers in files that other libraries read as well.

| suffix                | written | read | by                                   |
|-----------------------|---------|------|--------------------------------------|
| .safetensors          | yes     | yes  | safetensors                          |
| .npz                  | yes     | yes  | NumPy                                |
| .h5, .hdf5            | no      | yes  | h5py                                 |
| .pt, .pth, .bin       | no      | yes  | torch, without running code of files |

Arrays have the names of their places: `{"model": {"w": a}}` is `model.w`. What else there is, and how it is nested,
is JSON beside them, under `dnnc`; of a file without it `load_arrays` gives the arrays by name. Arrays are little-endian
in files, and dtypes that NumPy does not have are the bytes of their elements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import is_zipfile

import ml_dtypes
import numpy as np

from dnnc.array.core import Array
from dnnc.ir import checks
from dnnc.ir.errors import ArtifactError, DnncError, InputError, UnsupportedError, a_type, install
from dnnc.ir.files import replacing

Buffer = np.ndarray[Any, Any]
Arrays = dict[str, Buffer]
LAYOUT = "dnnc"  # the name of the JSON
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FOREIGN = {
    np.dtype(getattr(ml_dtypes, n)).name: np.dtype(getattr(ml_dtypes, n))
    for n in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int4",
        "uint4",
    )
}  # of ml_dtypes, by name
# names of dtypes in safetensors files
SAFE = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16), "U32": np.dtype(np.uint32), "I32": np.dtype(np.int32), "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64), "F16": np.dtype(np.float16), "BF16": BFLOAT16, "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64), "C64": np.dtype(np.complex64), "F8_E4M3": FOREIGN["float8_e4m3fn"],
    "F8_E5M2": FOREIGN["float8_e5m2"], "F8_E8M0": FOREIGN["float8_e8m0fnu"],
}  # fmt: skip


def save_arrays(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree: dicts, lists and tuples of arrays, numbers, texts and None. The file is replaced at once.

    Args:
        path: ends in .npz or .safetensors.
        tree: such as `{"model": params, "optimizer": optimizer.state_dict(), "epoch": 3}`.

    Raises:
        InputError: the tree holds something else, the suffix is another one, or the file cannot be written.
        UnsupportedError: safetensors is not installed.
    """
    suffix = _suffix(path)
    arrays: Arrays = {}
    layout = json.dumps(_described(tree, "", arrays))
    if suffix == ".npz":
        stored = {n: a.view(f"u{a.itemsize}") if a.dtype.name in FOREIGN else a for n, a in arrays.items()}
        with _replaced(path) as file:
            np.savez(file, **{LAYOUT: np.frombuffer(layout.encode(), np.uint8), **stored})  # type: ignore[arg-type]
    elif suffix == ".safetensors":
        safetensors = _library("safetensors.numpy")
        for n, a in arrays.items():
            if a.dtype not in SAFE.values():
                raise InputError(f"save_arrays: {n} is {a.dtype}, which safetensors has not; write an .npz file")
        with _replaced(path) as file:
            file.write(safetensors.save(arrays, {LAYOUT: layout}))
    else:
        raise InputError(f"save_arrays: {path}: expected a path that ends in .npz or .safetensors")


def load_arrays(path: str | os.PathLike[str]) -> Any:
    """Read a file of `save_arrays`: the tree, with NumPy arrays. Of other files the arrays by name.

    Raises:
        InputError: the suffix is none of .npz, .safetensors, .h5, .hdf5, .pt, .pth and .bin.
        ArtifactError: the file does not exist, or is damaged.
        UnsupportedError: the library that reads it is not installed.
    """
    read = READERS.get(_suffix(path))
    if read is None:
        raise InputError(f"load_arrays: {path}: expected a path that ends in {', '.join(READERS)}")
    try:
        layout, arrays = read(str(path))
    except (UnsupportedError, InputError):
        raise
    except DnncError as e:
        raise ArtifactError(f"load_arrays: {path} cannot be read: it {e}") from e
    except Exception as e:  # of five libraries, each with errors of its own
        raise ArtifactError(f"load_arrays: {path} cannot be read: {str(e) or type(e).__name__}") from e
    return arrays if layout is None else _restored(json.loads(layout), arrays, path)


@contextmanager
def _replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    try:
        with replacing(path) as file:
            yield file
    except OSError as e:
        raise InputError(f"save_arrays: {path} cannot be written: {e.strerror or e}") from e


def _suffix(path: str | os.PathLike[str]) -> str:
    return Path(checks.path(path, "path")).suffix.lower()


def _library(name: str, extra: str = "checkpoint") -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        package = name.partition(".")[0]
        raise UnsupportedError(f"this file needs {package}: {install(extra)}, or pip install {package}") from e


# --- trees ------------------------------------------------------------------------------------------------------------


def _described(tree: Any, path: str, arrays: Arrays) -> Any:
    """The JSON of a tree; its arrays go to `arrays`."""

    def child(name: Any, value: Any) -> Any:
        return _described(value, f"{path}.{name}" if path else str(name), arrays)

    if isinstance(tree, Mapping):
        for k in tree:
            if not isinstance(k, (str, int)):
                raise InputError(f"save_arrays: {path or 'the tree'} has the key {k!r}; expected a text or an integer")
        return {"dict": [[k, child(k, v)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"list" if isinstance(tree, list) else "tuple": [child(k, v) for k, v in enumerate(tree)]}
    if isinstance(tree, (bool, int, float, str, type(None))):
        return {"value": tree}
    a = tree._contents() if isinstance(tree, Array) else tree
    if not isinstance(a, (np.ndarray, np.generic)) or a.dtype.kind == "O":
        raise InputError(
            f"save_arrays: {path or 'the tree'} is {a_type(tree)}; expected an array, a number, a text or None"
        )
    name = path or "array"
    if name == LAYOUT or name in arrays:
        raise InputError(f"save_arrays: the name {name} stands for two arrays; rename one")
    a = np.asarray(a)
    if a.dtype.kind == "V" and a.dtype.name not in FOREIGN:
        raise InputError(f"save_arrays: {name} has dtype {a.dtype}; expected numbers or texts")
    a = a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))
    arrays[name] = np.ascontiguousarray(a).reshape(a.shape)
    return {"array": name, "dtype": a.dtype.name}


def _restored(node: dict[str, Any], arrays: Arrays, path: Any) -> Any:
    (kind, value), *_ = node.items()
    if kind == "dict":
        return {k: _restored(v, arrays, path) for k, v in value}
    if kind in ("list", "tuple"):
        made = [_restored(v, arrays, path) for v in value]
        return made if kind == "list" else tuple(made)
    if kind == "value":
        return value
    if value not in arrays:
        raise ArtifactError(f"load_arrays: {path} has no array {value}; it was cut, or another program wrote it again")
    return arrays[value].view(FOREIGN.get(node["dtype"], arrays[value].dtype))


# --- formats ----------------------------------------------------------------------------------------------------------


def _npz(path: str) -> tuple[str | None, Arrays]:
    if not is_zipfile(path):
        os.stat(path)
        raise ArtifactError("is no .npz file, or it was cut")
    with np.load(path, allow_pickle=False) as file:
        arrays = {n: file[n] for n in file.files}
    layout = arrays.pop(LAYOUT, None)
    return None if layout is None else layout.tobytes().decode(), arrays


def _safetensors(path: str) -> tuple[str | None, Arrays]:
    library = _library("safetensors")
    data = Path(path).read_bytes()
    arrays: Arrays = {}
    for n, t in library.deserialize(data):
        if t["dtype"] not in SAFE:
            raise ArtifactError(f"has {n} of dtype {t['dtype']}; expected one of {', '.join(SAFE)}")
        arrays[n] = np.frombuffer(bytearray(t["data"]), SAFE[t["dtype"]]).reshape(t["shape"])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}).get(LAYOUT), arrays


def _hdf5(path: str) -> tuple[str | None, Arrays]:
    arrays: Arrays = {}
    library = _library("h5py")

    def visit(name: str, item: Any) -> None:
        if isinstance(item, library.Dataset) and item.shape is not None:  # None: an empty data set
            arrays[name.replace("/", ".")] = np.asarray(item[()])

    with library.File(path, "r") as file:
        file.visititems(visit)
    return None, arrays


def _torch(path: str) -> tuple[str | None, Arrays]:
    _library("torch", "torch")
    return None, import_module("dnnc.torch.checkpoint").arrays_of(path)


READERS: Mapping[str, Callable[[str], tuple[str | None, Arrays]]] = {
    ".npz": _npz, ".safetensors": _safetensors, ".h5": _hdf5, ".hdf5": _hdf5, ".pt": _torch, ".pth": _torch,
    ".bin": _torch,
}  # fmt: skip
