"""Options are checked where they are given; the environment is read as documented."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dnnc.ir.errors import DnncError, InputError, TargetError, TuneError, UnsupportedError
from dnnc.options import CompileOptions, available_cpus, cache_folder, check_every_pass, make_options, thread_count
from dnnc.passes.schedule.problem import Choice


def test_defaults() -> None:
    o = CompileOptions()
    assert (o.target, o.precision, o.numerics, o.opt_level, o.verify, o.cache, o.threads) == (
        "llvm",
        None,
        "standard",
        3,
        "kernels",
        "auto",
        None,
    )
    assert o.dims == {} and o.outputs == () and o.tune is None


GOOD: list[dict[str, Any]] = [
    {"target": "llvm -mcpu=skylake-avx512"},
    {"target": "cuda:1 -arch=sm_90a"},
    {"target": "llvm -threads=1", "threads": 1},
    {"precision": "bfloat16", "numerics": "strict"},
    {"dims": {"batch": 8, "seq": (1, 512)}},
    {"outputs": ["conv1"], "opt_level": 0},
    {"tune": 60, "verify": "model", "cache": False},
    {"tune": Path("m.tune.jsonl"), "verify": False, "cache": "kernels"},
    {"tune": {"key": Choice("map", (("lanes", 16),))}},
]


@pytest.mark.parametrize("given", GOOD, ids=lambda g: "-".join(g))
def test_good_values_are_kept_hashed_and_pickled(given: dict[str, Any]) -> None:
    o = make_options(given)
    for name, v in given.items():
        assert getattr(o, name) == (tuple(v) if name == "outputs" else v)
    assert pickle.loads(pickle.dumps(o)) == o == make_options(given)
    assert hash(o) == hash(make_options(given))


BAD: list[tuple[dict[str, Any], type[DnncError], str]] = [
    ({"target": "tpu"}, TargetError, "expected llvm, cuda, .*reference first"),
    ({"target": ""}, TargetError, "target=''"),
    ({"target": "llvm:1"}, TargetError, "cuda:1"),
    ({"target": "llvm mcpu=x"}, TargetError, "-mcpu=skylake-avx512"),
    ({"target": 3}, TargetError, "target=3"),
    ({"target": "llvm -threads=2", "threads": 1}, TargetError, "-threads=2, but threads=1"),
    ({"precision": "int3"}, UnsupportedError, "'float32', 'tf32', 'float16' or 'bfloat16'"),
    ({"numerics": "sloppy"}, InputError, "'strict', 'standard' or 'fast'"),
    ({"opt_level": 4}, InputError, "0, 1, 2 or 3"),
    ({"opt_level": True}, InputError, "opt_level=True"),
    ({"verify": True}, InputError, "False, 'kernels' or 'model'"),
    ({"dims": {"N": 0.5}}, InputError, r"dims\['N'\]=0.5"),
    ({"dims": {"N": (8, 1)}}, InputError, "low <= high"),
    ({"dims": 8}, InputError, "expected a mapping"),
    ({"outputs": "conv1"}, InputError, "a sequence of names"),
    ({"tune": -1}, TuneError, "a budget in seconds"),
    ({"tune": True}, TuneError, "tune=True"),
    ({"tune": {1: Choice("map", ())}}, TuneError, "by the key of their workload"),
    ({"cache": True}, InputError, "a path"),
    ({"cache": "off"}, InputError, "False for none"),
    ({"threads": 0}, InputError, "at least 1"),
    ({"traget": "llvm"}, InputError, "did you mean target"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD, ids=lambda v: str(v)[:40] if isinstance(v, dict) else None)
def test_bad_values_are_refused(given: dict[str, Any], error: type[DnncError], message: str) -> None:
    with pytest.raises(error, match=message):
        make_options(given)


def test_dims_are_normal_and_cannot_be_changed() -> None:
    o = CompileOptions(dims={"b": (4, 4), "a": 1})
    assert list(o.dims.items()) == [("a", 1), ("b", 4)]
    with pytest.raises(TypeError):
        o.dims["a"] = 2  # type: ignore[index]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNC_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("~/.cache/dnnc").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(os.sep, "base"))
    assert cache_folder() == Path(os.sep, "base", "dnnc")
    monkeypatch.setenv("DNNC_CACHE_DIR", "mine")
    assert cache_folder() == Path("mine")
    assert cache_folder("given") == Path("given") and cache_folder(False) is None


def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNC_THREADS", raising=False)
    assert thread_count() == available_cpus() == thread_count(10**6)
    monkeypatch.setenv("DNNC_THREADS", "1")
    assert thread_count() == 1
    assert thread_count(available_cpus()) == available_cpus()
    monkeypatch.setenv("DNNC_THREADS", "many")
    with pytest.raises(InputError, match="DNNC_THREADS='many'"):
        thread_count()


def test_check_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, want in [("1", True), ("0", False), ("", False)]:
        monkeypatch.setenv("DNNC_CHECK", text)
        assert check_every_pass() is want
