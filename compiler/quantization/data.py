"""Samples for calibration: arrays, .npy and .npz files, folders of them, or random numbers, as feeds of a model.

A feed has an array for each input. Arrays with more rows than the model's batch are cut; folders are read file by file,
each time they are gone through, so that memory holds one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from dnnc.ir.errors import InputError, a_type, count

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]
ROWS = 8  # of a call where the model's batch is open
RANDOM = 8  # feeds of random numbers
CHECKED = 16  # feeds that errors are measured with


@dataclass(frozen=True)
class Input:
    """An input of a model; sizes that are open are names, "" without one."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(str(d) or '?' for d in self.shape)}]"


def model_inputs(values: Sequence[onnx.ValueInfoProto], dims: Mapping[str, Any]) -> list[Input]:
    """Inputs of a model, with the sizes that `dims` gives. InputError for what is no array."""
    out = []
    for v in values:
        t = v.type.tensor_type
        if not v.type.HasField("tensor_type") or t.elem_type == onnx.TensorProto.STRING:
            raise InputError(f"input {v.name} is no array of numbers: calibration cannot feed it")
        fixed = {n: s for n, s in dims.items() if isinstance(s, int)}
        shape = tuple(
            d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else fixed.get(d.dim_param, d.dim_param)
            for d in t.shape.dim  # some files write an open size as -1
        )
        out.append(Input(v.name, np.dtype(helper.tensor_dtype_to_np_dtype(t.elem_type)), shape))
    return out


class Samples:
    """Feeds that can be gone through several times.

    Args:
        inputs: of the model.
        sources: arrays, dicts of arrays, or paths.
        limit: rows of the first input that are taken at most.

    Attributes:
        rows: of the first input, in all feeds.
        shapes: of the feeds, each once.

    Raises:
        InputError: a source cannot be read, does not fit the model, or holds NaN or infinite numbers.
    """

    def __init__(self, inputs: Sequence[Input], sources: Sequence[Any], limit: int | None = None) -> None:
        self.inputs, self._sources, self._limit = list(inputs), list(sources), limit
        self._count = self.rows = 0
        found: dict[Any, dict[str, tuple[int, ...]]] = {}
        for source, feed in self._read():
            _check_finite(feed, source)
            shapes = {n: a.shape for n, a in feed.items()}
            found.setdefault(tuple(shapes.items()), shapes)
            self._count += 1
            self.rows += _rows(feed, self.inputs)
        self.shapes = list(found.values())

    def __iter__(self) -> Iterator[Feed]:
        return (feed for _, feed in self._read())

    def __len__(self) -> int:
        return self._count

    def _read(self) -> Iterator[tuple[Any, Feed]]:
        rows = 0
        for source in self._sources:
            for feed in _feeds(self.inputs, source):
                if self._limit is not None and rows >= self._limit:
                    return
                feed = self._within(feed, rows)
                yield source, feed
                rows += _rows(feed, self.inputs)

    def _within(self, feed: Feed, rows: int) -> Feed:
        """A feed with no more rows than the limit leaves."""
        first = self.inputs[0]
        if self._limit is None or not first.shape or not isinstance(first.shape[0], str):
            return feed
        left, here = self._limit - rows, feed[first.name].shape[0]
        if here <= left:
            return feed
        batched = {i.name for i in self.inputs if i.shape and i.shape[0] == first.shape[0]}
        return {n: a[:left] if n in batched else a for n, a in feed.items()}


def samples(data: Any, inputs: Sequence[Input], limit: int | None = None, random: bool = False) -> Samples:
    """What a user gives as calibration data.

    Args:
        data: an array for a model of one input, a dict of arrays by input name, a list of either or what gives one
            after the other, the path of a .npy or .npz file or of a folder of them, or None.
        inputs: of the model.
        limit: samples (rows of the first input) that are taken at most.
        random: make numbers up where there is no data.

    Raises:
        InputError: no data, an empty folder, or arrays that the model does not take. What lies in a folder is checked
            when it is read.
    """
    if not inputs:
        raise InputError("the model has no inputs: all that it computes is constant, and there is nothing to calibrate")
    if data is None and not random:
        raise InputError(
            "calibration needs data, such as 100 inputs that the model will meet: --data FILE.npz (arrays by input "
            "name), a folder of .npy or .npz files, or arrays from Python; --random calibrates on random numbers, "
            "which gives the speed of the quantized model but not its accuracy"
        )
    if data is not None and random:
        raise InputError("calibrate either on data or on random numbers, not on both")
    if data is None:
        return Samples(inputs, [_made_up(inputs, k) for k in range(RANDOM)], limit)
    sources = _sources(data)
    out = Samples(inputs, sources, limit)
    if not len(out):
        raise InputError("there are no samples in the calibration data")
    return out


def first_feeds(samples: Samples) -> list[Feed]:
    """Feeds that errors are measured with."""
    return list(islice(samples, CHECKED))


def _sources(data: Any) -> list[Any]:
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        if not path.exists():
            raise InputError(f"there is no calibration data at {path}; give a .npy or .npz file, or a folder of them")
        if not path.is_dir():
            return [path]
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in (".npy", ".npz"))
        if not files:
            others = sorted({p.suffix for p in path.iterdir() if p.is_file()})
            has = (
                f"; it has {', '.join(s or 'files without suffix' for s in others[:5])}" if others else "; it is empty"
            )
            raise InputError(f"the folder {path} has no .npy and no .npz files{has}")
        return list(files)
    single = isinstance(data, (Mapping, np.ndarray)) or hasattr(data, "__array__") or hasattr(data, "__dlpack__")
    if single or not isinstance(data, Iterable):
        return [data]
    found = list(data)
    if not found:
        raise InputError(f"there are no samples in the calibration data: the {type(data).__name__} is empty")
    return found


def _loaded(source: Any) -> Any:
    if not isinstance(source, (str, os.PathLike)):
        return source
    try:
        loaded = np.load(source, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else {n: loaded[n] for n in loaded.files}
    except (OSError, ValueError, EOFError) as e:
        raise InputError(f"{source} is no .npy or .npz file: {e}") from None


def _feeds(inputs: Sequence[Input], source: Any) -> Iterator[Feed]:
    """The feeds of one source."""
    at = f"{source}: " if isinstance(source, (str, os.PathLike)) else ""
    given = _loaded(source)
    if not isinstance(given, Mapping):
        if len(inputs) != 1:
            raise InputError(f"{at}the model has {count(len(inputs), 'input')} "
            f"({', '.join(i.name for i in inputs)}): give "
                             "arrays by their names")  # fmt: skip
        given = {inputs[0].name: given}
    missing = [i.name for i in inputs if i.name not in given]
    if missing:
        raise InputError(f"{at}no array for {', '.join(missing)}; there are {', '.join(map(str, given)) or 'none'}")
    arrays = {i.name: _array(given[i.name], i, at) for i in inputs}
    parts = {i.name: _parts(arrays[i.name], i, at) for i in inputs}
    counts = {n: len(p) for n, p in parts.items() if len(p) != 1}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{n} {arrays[n].shape[0]}" for n in counts)
        raise InputError(f"{at}the inputs have different numbers of samples: {found}")
    for k in range(max(counts.values(), default=1)):
        yield {n: p[k] if len(p) > 1 else p[0] for n, p in parts.items()}


def _array(given: Any, i: Input, at: str) -> Array:
    try:
        a = np.asarray(given)
    except (ValueError, TypeError) as e:
        raise InputError(f"{at}{i.name}: {a_type(given)} is no array: {e}") from None
    if a.dtype == i.dtype:
        return a
    same = a.dtype.kind == i.dtype.kind or (a.dtype.kind in "iu" and i.dtype.kind in "iu")
    if not same:
        raise InputError(
            f"{at}{i.name}: the array is {a.dtype}, and the model takes {i.dtype}; bring it to the form that the model "
            "is called with (scaled, normalized), then save it"
        )
    return a.astype(i.dtype)


def _parts(a: Array, i: Input, at: str) -> list[Array]:
    """An array in pieces that a call takes: rows of the batch, or whole inputs where it has an axis more."""
    if a.ndim == len(i.shape) + 1:
        return [p for one in a for p in _parts(one, i, at)]
    if a.ndim == len(i.shape) - 1:
        a = a[None]  # a sample without the axis of the batch
    fits = a.ndim == len(i.shape) and all(p == q for p, q in zip(a.shape[1:], i.shape[1:]) if isinstance(q, int))
    if not fits:
        raise InputError(f"{at}{i.name}: an array of shape {list(a.shape)}; the model takes {i}")
    if not i.shape:
        return [a]
    batch = i.shape[0] if isinstance(i.shape[0], int) else ROWS
    if a.shape[0] == batch:
        return [a]
    if isinstance(i.shape[0], int) and (a.shape[0] < batch or (a.shape[0] % batch and batch != 1)):
        whole = a.shape[0] // batch
        if not whole:
            raise InputError(f"{at}{i.name}: {a.shape[0]} samples; a call of the model takes {batch}")
        a = a[: whole * batch]
    if a.shape[0] == 0:
        raise InputError(f"{at}{i.name}: the array has no samples: {list(a.shape)}")
    return [a[k : k + batch] for k in range(0, a.shape[0], batch)]


def _rows(feed: Feed, inputs: Sequence[Input]) -> int:
    a = feed[inputs[0].name] if inputs else np.zeros(1)
    return int(a.shape[0]) if a.ndim else 1


def _check_finite(feed: Feed, source: Any) -> None:
    for name, a in feed.items():
        if a.dtype.kind != "f":
            continue
        bad = int(a.size - np.count_nonzero(np.isfinite(a)))
        if bad:
            at = f"{source}: " if isinstance(source, (str, os.PathLike)) else ""
            raise InputError(
                f"{at}{bad} of the {a.size} numbers of {name} are NaN or infinite; mend or leave out the sample"
            )


def _made_up(inputs: Sequence[Input], seed: int) -> Feed:
    """Normal floats, integers 0 and 1; open sizes are 1."""
    rng, feed = np.random.default_rng(seed), {}
    for i in inputs:
        shape = tuple(d if isinstance(d, int) else 1 for d in i.shape)
        drawn = rng.standard_normal(shape, np.float32) if i.dtype.kind == "f" else rng.integers(0, 2, shape)
        feed[i.name] = np.asarray(drawn).astype(i.dtype)
    return feed
