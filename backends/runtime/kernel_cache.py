"""Compiled kernels on disk: hex SHA-256 -> bytes, in one folder that several processes share.

An entry is one file: magic, SHA-256 of the payload, payload. It is written beside its place and moved there, so a
reader sees all of it or nothing; two writers of a key write the same bytes. A damaged entry is a miss and is removed.
The least recently used entries go when the folder exceeds its limit. A folder that cannot be used disables the cache,
which is no error: `reason` says why.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from dnnc.ir.errors import InternalError

LIMIT_BYTES = 2 << 30
OFF = "switched off"
_MAGIC = b"dnnc-kernel-1\n"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
_KEY = re.compile(r"[0-9a-f]{64}")
_STALE_SECONDS = 3600  # a temporary file of a process that ended while writing
# a write scans the folder with the probability of its share of 1/64 of the limit: by about so much it may be exceeded
_SCANS = 64
_KEPT = 0.9  # of the limit, after removing


@dataclass(frozen=True)
class CacheInfo:
    """What a cache holds. `reason` is why it is disabled, or empty."""

    path: Path | None
    entries: int
    bytes: int
    limit_bytes: int
    reason: str


def unwritable(folder: Path) -> str:
    """Why no entry can be written below a folder, which need not exist; empty where one can."""
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"cannot write {folder}: {there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{folder} cannot be written"


class KernelCache:
    """A bounded folder of compiled kernels, safe for threads and for processes.

    Args:
        path: the folder, which need not exist; None for no cache.
        limit_bytes: the size to stay below.

    Attributes:
        reason: why nothing is kept; empty while the cache works.
    """

    def __init__(self, path: Path | str | None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = None if path is None else Path(path)
        self.limit_bytes = limit_bytes
        self.reason = OFF if path is None else ""
        self._serial = itertools.count()
        if self.path is not None:
            self._open(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """For reports: why kernels are not kept, though nobody switched the cache off."""
        return (f"compiled kernels are not kept: {self.reason}",) if self.reason and self.reason != OFF else ()

    def get(self, key: str) -> bytes | None:
        """The bytes put under `key`, or None. Marks the entry as used."""
        file = self._file(key)
        if file is None:
            return None
        try:
            data = file.read_bytes()
        except OSError:
            return None
        payload = data[_HEAD:]
        if data[:_HEAD] != _head(payload):
            _remove(file)
            return None
        try:
            os.utime(file)
        except OSError:  # a read-only folder still serves
            pass
        return payload

    def __contains__(self, key: str) -> bool:
        """Is there an entry? It may be damaged, or be gone at once."""
        file = self._file(key)
        return file is not None and file.exists()

    def put(self, key: str, payload: bytes) -> None:
        """Keep `payload` under `key`, unless the cache is disabled or its folder is not writable (disables it)."""
        file = self._file(key)
        if file is None or self.reason:
            return
        temporary = file.with_name(f".{key[:16]}.{os.getpid()}.{next(self._serial)}.tmp")
        try:
            for folder in (file.parents[1], file.parent):  # `parents=True` would not give the mode to both
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(_head(payload) + payload)
            os.replace(temporary, file)
        except OSError as e:
            _remove(temporary)
            self.reason = f"cannot write {file.parent}: {e.strerror or e}"
            return
        # A share of all writes looks, since a scan of 150,000 entries takes a second. Keys are uniform.
        if int(key[:8], 16) * self.limit_bytes < (_HEAD + len(payload)) * _SCANS << 32:
            self._evict()

    def info(self) -> CacheInfo:
        """Count what is there now, other processes' entries too."""
        entries = self._scan()
        return CacheInfo(self.path, len(entries), sum(size for _, size, _ in entries), self.limit_bytes, self.reason)

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        entries = self._scan()
        for _, _, file in entries:
            _remove(file)
        return len(entries)

    def _open(self, path: Path) -> None:
        """Entries are code that will run: a folder in which anybody may write is not used."""
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return
        except OSError as e:
            self._disable(f"cannot read {path}: {e.strerror or e}")
            return
        if not stat.S_ISDIR(mode):
            self._disable(f"{path} is not a folder")
        elif os.name == "posix" and mode & stat.S_IWOTH:
            self._disable(f"{path} may be written by every user (chmod o-w it)")

    def _disable(self, reason: str) -> None:
        self.path, self.reason = None, reason

    def _file(self, key: str) -> Path | None:
        if not _KEY.fullmatch(key):
            raise InternalError(f"cache key {key!r} is not a hex SHA-256")
        return None if self.path is None else self.path / key[:2] / key[2:]

    def _evict(self) -> None:
        entries = sorted(self._scan())
        total = sum(size for _, size, _ in entries)
        if total <= self.limit_bytes:
            return
        for _, size, file in entries:
            if total <= self.limit_bytes * _KEPT:
                break
            _remove(file)
            total -= size

    def _scan(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, file) of every entry; removes what a process left that ended while writing."""
        entries = []
        for file in self.path.glob("[0-9a-f][0-9a-f]/*") if self.path is not None else ():
            try:
                s = file.stat()
            except OSError:  # another process removed it
                continue
            if not file.name.endswith(".tmp"):
                entries.append((s.st_mtime, s.st_size, file))
            elif time.time() - s.st_mtime > _STALE_SECONDS:
                _remove(file)
        return entries


def _head(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).digest()


def _remove(file: Path) -> None:
    try:
        file.unlink()
    except OSError:  # gone already, or not ours to remove
        pass
