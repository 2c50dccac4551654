"""A compiled model as one HTML page that needs no network: `dnnc view`, `f.report.html`.

`collect` asks everything of the executable, `page` packs it. The page draws with Cytoscape and dagre, whose scripts lie
in `vendor/`; its own parts are in `page/`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dnnc.ir.errors import InputError
from dnnc.ir.files import replacing
from dnnc.view.collect import collect
from dnnc.view.page import html

if TYPE_CHECKING:
    from dnnc.executable import Executable
    from dnnc.tools.profile import Profile


def write_html(f: Executable, path: str | os.PathLike[str], profile: Profile | None = None, title: str = "") -> None:
    """Write the page of a compiled model; see `Report.html`. InputError: the file cannot be written."""
    text = html(collect(f, profile, title))
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as e:
        raise InputError(f"cannot write the page {path}: {e.strerror or e}") from None
