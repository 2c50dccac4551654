"""A cache of its own for each module, a compiled model, a path to save it to, and no warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from saved_models import NET

import dnnc
from dnnc.executable import Executable
from dnnc.tools.sample_graphs import graph_of


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as m:
        path = tmp_path_factory.mktemp("cache")
        m.setenv("DNNC_CACHE_DIR", str(path))
        yield path


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Code that would not fit must not go unnoticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", dnnc.ArtifactWarning)
        yield


@pytest.fixture(scope="module")
def net(folder: Path) -> Executable:
    f = dnnc.compile(graph_of(NET))
    assert isinstance(f, Executable)
    return f


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.dnnc"
