"""Texts from the command line to values: dims, caches, models, and arrays for the inputs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from dnnc.executable import Executable
from dnnc.ir.errors import InputError, ModelError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.constant_text import load_constants
from dnnc.ir.graph.text import parse
from dnnc.ir.shapes import as_env, bind_variables, resolve

Array = np.ndarray[Any, Any]
FILLS = ("random", "zeros", "ones")
INTEGERS = 2  # random integers are below this: a valid index of nearly every axis, and a mask


def parse_dims(texts: Sequence[str]) -> dict[str, Any]:
    """`["batch=1,seq=16..128"]` -> `{"batch": 1, "seq": (16, 128)}`."""
    out: dict[str, Any] = {}
    for part in (p.strip() for text in texts for p in text.split(",")):
        name, equals, size = part.rpartition("=")
        low, dots, high = size.partition("..")
        if not name or not equals or not low.isdigit() or (dots and not high.isdigit()):
            raise typer.BadParameter(
                f"{part!r}: expected NAME=SIZE or NAME=LOW..HIGH, such as batch=1,seq=16..128", param_hint="--dims"
            )
        if name in out:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--dims")
        out[name] = (int(low), int(high)) if dots else int(low)
    return out


def parse_cache(text: str) -> Any:
    """`auto`, `off` or a folder."""
    return False if text == "off" else text


def load_model(path: str) -> Any:
    """Return what `dnnc.compile` takes: graph text is parsed with its .npz constants; others stay a path."""
    return load_graph(path) if path.endswith(".py") else path


def load_graph(path: str) -> Graph:
    """Graph text from a file. ModelError where there is none, ParseError with line and column where it is no graph."""
    file = Path(path)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
    side = side_file(path)
    return parse(text, load_constants(side) if side.exists() else None)


def side_file(path: str | Path) -> Path:
    """The .npz file with the constants of graph text."""
    return Path(path).with_suffix(".npz")


# --- arrays -----------------------------------------------------------------------------------------------------------


def parse_inputs(texts: Sequence[str], names: Sequence[str]) -> dict[str, str | Array]:
    """`--input` texts by input name: an array where a file is given, else one of FILLS.

    A text is NAME=FILE.npy, NAME=FILL, FILE.npz (arrays by name), or for all inputs FILL; a bare FILE.npy is for a
    single input. No text at all fills all inputs with random numbers.
    """
    out: dict[str, str | Array] = {}
    for text in texts or ("random",):
        out.update(_one_input(text, names))
    return out


def _one_input(text: str, names: Sequence[str]) -> dict[str, str | Array]:
    name = max((n for n in names if text.startswith(n + "=")), key=len, default=None)
    if name is not None:
        what = text[len(name) + 1 :]
        return {name: what if what in FILLS else _single(load_array(what), what)}
    if text in FILLS:
        return dict.fromkeys(names, text)
    known = f"the model's inputs are {', '.join(names) or 'none'}"
    if "=" in text and not Path(text).exists():
        raise InputError(f"--input {text}: the model has no input {text.partition('=')[0]!r}; {known}")
    loaded = load_array(text)
    if isinstance(loaded, dict):
        unknown = [n for n in loaded if n not in names]
        if unknown:
            raise InputError(f"--input {text}: the file holds {', '.join(unknown)}; {known}")
        return dict(loaded)
    if len(names) != 1:
        raise InputError(f"--input {text}: say for which input, NAME={text}; {known}")
    return {names[0]: loaded}


def load_array(path: str) -> Array | dict[str, Array]:
    """The array of a .npy file, the arrays of a .npz file. InputError where it is neither."""
    try:
        loaded = np.load(path, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else {n: loaded[n] for n in loaded.files}
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}; an input is a .npy file, a .npz file, or one of {', '.join(FILLS)}"
        ) from None
    except (OSError, ValueError, EOFError) as e:
        raise InputError(f"{path} is no .npy or .npz file: {e}") from None


def _single(loaded: Array | dict[str, Array], path: str) -> Array:
    if isinstance(loaded, dict):
        raise InputError(f"{path} holds several arrays; give the .npz file without a name, or a .npy file")
    return loaded


def make_arrays(f: Executable, texts: Sequence[str], dims: Mapping[str, Any], seed: int) -> list[Array]:
    """Make an array for every input, sizes from model, files and `dims`. InputError: a missing array or dim."""
    names = [s.name for s in f.inputs]
    given = parse_inputs(texts, names)
    missing = [n for n in names if n not in given]
    if missing:
        raise InputError(
            f"no array is given for {', '.join(missing)}; add --input {missing[0]}=FILE.npy, or {missing[0]}=random"
        )
    if f.deferred:
        filled = [n for n, a in given.items() if isinstance(a, str)]
        if filled:
            raise InputError(
                f"shapes of this model depend on the contents of its inputs: give files for {', '.join(filled)}"
            )
        return [np.asarray(given[n]) for n in names]
    bound = {v: _low(dims[v.name]) for v in f.graph.dims.values() if v.name in dims}
    for n, v in zip(names, f.graph.inputs):
        a = given[n]
        if not isinstance(a, str):
            bind_variables(bound, v, a.shape)
    rng = np.random.default_rng(seed)
    return [fill(rng, v, a, bound) if isinstance(a := given[n], str) else a for n, v in zip(names, f.graph.inputs)]


def _low(d: Any) -> int:
    return int(d[0] if isinstance(d, tuple) else d)


def fill(rng: np.random.Generator, v: Value, how: str, dims: Mapping[Var, int]) -> Array:
    """Normal floats, integers 0 and 1, or a constant."""
    shape = resolve(v.type.shape, as_env(dims))
    if not all(isinstance(d, int) for d in shape):
        raise InputError(
            open_dims(
                f"the shape of input {v.name} is {v.type}", [str(d) for d in v.type.shape if not isinstance(d, int)]
            )
        )
    t = v.type.dtype
    if t.kind == "s":
        raise InputError(f"input {v.name} holds strings; dnnc cannot make them up")
    if how != "random":
        return np.full(shape, int(how == "ones"), t.numpy)
    drawn: Array = rng.standard_normal(shape, np.float32) if t.kind in "fc" else rng.integers(0, INTEGERS, shape)
    return np.asarray(drawn).astype(t.numpy)


def open_dims(what: str, names: Sequence[str]) -> str:
    """The message for dims that need a size."""
    shown = list(dict.fromkeys(names))
    return (
        f"{what}: the size of {', '.join(shown)} is open; give it with --dims {','.join(f'{n}=1' for n in shown)}, "
        "or an array with --input"
    )
