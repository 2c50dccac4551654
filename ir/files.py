"""Files that are written in one step: a reader sees the old file or the new one, and a failure leaves the old one."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file beside `path` to write, and rename it to `path` at the end of the block.

    The data is on the disk before the rename. An exception in the block (a full disk, Control-C) removes the new file
    and leaves `path` as it was. A symbolic link stays a link: its file is replaced. The mode is kept. OSError: the
    folder does not exist, cannot be written or is full.
    """
    os.stat(Path(path).parent)  # `realpath` would drop a folder that does not exist before ".."
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
