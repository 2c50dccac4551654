"""The build backend: setuptools', with wheels free of stale modules and an editable install that works from the folder
above the clone.

An editable install of setuptools is a finder behind Python's own. From the folder above a clone that is named dnnc,
Python's own takes the clone for a namespace package and the finder is never asked. A regular package wins over a
namespace package wherever it stands on the path, so the editable wheel also holds a package `dnnc` that loads the real
one. What stands earlier on the path, in PYTHONPATH, still wins over it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

STUB = '''"""dnnc of a clone, for editable installs: the module that is loaded here takes the place of this one."""

import sys
from importlib.util import module_from_spec

from {finder} import _EditableFinder

_spec = _EditableFinder.find_spec("dnnc")
_module = sys.modules["dnnc"] = module_from_spec(_spec)
_spec.loader.exec_module(_module)
'''


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build a wheel of what is there now: files of earlier builds would go into it as well."""
    for old in (Path("build/lib"), *Path("build").glob("bdist.*")):
        shutil.rmtree(old, ignore_errors=True)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build setuptools' editable wheel and add the package to it."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory) / name
    with zipfile.ZipFile(path) as wheel:
        entries = {i.filename: (i, wheel.read(i)) for i in wheel.infolist()}
    finders = [m[1] for n in entries if (m := re.fullmatch(r"(__editable__\w+_finder)\.py", n))]
    record = next(n for n in entries if n.endswith(".dist-info/RECORD"))
    if len(finders) != 1:  # another layout of editable wheels: a plain path, which needs no help
        return name
    stub = STUB.format(finder=finders[0]).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(stub).digest()).rstrip(b"=").decode()
    listed = entries[record][1].decode().rstrip("\n") + f"\ndnnc/__init__.py,sha256={digest},{len(stub)}\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for n, (info, data) in entries.items():
            wheel.writestr(info, listed.encode() if n == record else data)
        wheel.writestr("dnnc/__init__.py", stub)
    return name
