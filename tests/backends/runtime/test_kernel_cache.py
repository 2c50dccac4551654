"""The kernel cache: what goes in comes out, damage is a miss, the folder stays bounded, several processes share it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.ir.errors import InternalError


def key(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def file_of(folder: Path, n: int) -> Path:
    return folder / key(n)[:2] / key(n)[2:]


def test_round_trip(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "a" / "b")
    assert cache.get(key(1)) is None
    for n, payload in enumerate((b"", b"x", bytes(range(256)) * 100)):
        cache.put(key(n), payload)
        assert cache.get(key(n)) == payload
    again = KernelCache(tmp_path / "a" / "b")
    assert again.get(key(1)) == b"x"
    info = again.info()
    assert (info.entries, info.reason, info.path) == (3, "", tmp_path / "a" / "b")
    assert info.bytes > 25600
    assert again.clear() == 3
    assert again.info().entries == 0
    assert again.get(key(1)) is None


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d + b"!", lambda d: d[:5], lambda d: b"", lambda d: d[:60] + b"?" + d[61:]]
)
def test_a_damaged_entry_is_a_miss_and_goes(tmp_path: Path, damage: object) -> None:
    cache = KernelCache(tmp_path)
    cache.put(key(1), b"payload" * 20)
    file = file_of(tmp_path, 1)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    assert cache.get(key(1)) is None
    assert not file.exists()
    cache.put(key(1), b"new")
    assert cache.get(key(1)) == b"new"


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, limit_bytes=10_000)
    for n in range(8):
        cache.put(key(n), b"x" * 1000)
        os.utime(file_of(tmp_path, n), (1e9 + n, 1e9 + n))
    assert cache.get(key(0)) is not None  # used now
    for n in range(8, 12):
        cache.put(key(n), b"x" * 1000)
    assert cache.info().bytes <= 10_000
    assert cache.get(key(0)) is not None
    assert cache.get(key(11)) is not None
    assert cache.get(key(1)) is None


def test_what_a_writer_left_behind_goes(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.put(key(1), b"x")
    old, new = (file_of(tmp_path, 1).with_name(f".{n}.tmp") for n in ("old", "new"))
    for f in (old, new):
        f.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    assert cache.info().entries == 1
    assert not old.exists()
    assert new.exists()  # somebody may be writing it


def test_an_unusable_folder_disables_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for path, words in (
        (None, "switched off"),
        (blocked, "not a folder"),
        (blocked / "below", "cannot"),
        (open_to_all, "every user"),
    ):
        cache = KernelCache(path)
        cache.put(key(1), b"x")
        assert cache.get(key(1)) is None
        assert words in cache.reason
        assert cache.info().entries == cache.clear() == 0


def test_folders_are_for_the_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        KernelCache(tmp_path / "new" / "cache").put(key(1), b"x")
    finally:
        os.umask(old)
    assert KernelCache(tmp_path / "new" / "cache").get(key(1)) == b"x"
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o077 == 0


def test_keys_are_hashes(tmp_path: Path) -> None:
    for bad in ("", "../../etc/passwd", "A" * 64, key(1)[:-1], key(1) + "\n"):
        with pytest.raises(InternalError, match="SHA-256"):
            KernelCache(tmp_path).get(bad)


@pytest.mark.slow
def test_writes_seldom_look_at_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation makes a cache of its own: its first write must not cost a look at every entry of a large folder."""
    looks = []
    monkeypatch.setattr(KernelCache, "_scan", lambda self: looks.append(self) or [])
    for n in range(500):
        KernelCache(tmp_path).put(key(n), b"x" * 1000)
    assert not looks  # 0.5 MB of 2 GB
    for n in range(500):
        KernelCache(tmp_path, limit_bytes=10_000_000).put(key(n), b"x" * 1000)
    assert 1 <= len(looks) <= 30  # 64 looks while the limit is written once: 3 in the mean


WRITER = """
import hashlib, sys
from dnnc.backends.runtime.kernel_cache import KernelCache
cache = KernelCache(sys.argv[1], limit_bytes=60_000)
for n in range(1500):
    k = n * 7 % 97
    key, payload = hashlib.sha256(str(k).encode()).hexdigest(), bytes([k]) * 1000
    cache.put(key, payload)
    found = cache.get(key)
    assert found is None or found == payload
assert not cache.reason, cache.reason
"""


@pytest.mark.slow
def test_processes_share_it(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)
    ]
    for w in writers:
        _, err = w.communicate(timeout=600)
        assert w.returncode == 0, err.decode()
    assert 0 < KernelCache(tmp_path).info().bytes <= 60_000 * (1 + 3 / 16)
