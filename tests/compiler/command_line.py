"""Commands of `dnnc` as functions, for the tests of this folder."""

from __future__ import annotations

import json
from typing import Any

from support.cli import invoke


def dnnc(*args: str, code: int = 0) -> str:
    """What a command prints, both streams together. Fails on another exit code, with what was printed."""
    result = invoke(args)
    assert result.exit_code == code, result.output
    return result.output


def dnnc_json(*args: str) -> Any:
    return json.loads(dnnc(*args, "--json"))
