"""Small file systems of their own, to be filled to the last byte or lost with the power.

They need the right to mount; tests that ask for one are skipped without it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

EXT4 = ("mkfs.ext4", "-q", "-F", "-m", "0")
FILLER = "filler"


def _call(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"{command[0]}: {done.stderr.strip()}")


@contextmanager
def tmpfs(place: Path, megabytes: int) -> Iterator[Path]:
    """A file system in memory at ``place``."""
    with _mounted(place, "-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "none"):
        yield place


@contextmanager
def ext4(place: Path, megabytes: int, options: str = "") -> Iterator[Path]:
    """An ext4 at ``place``, in a file ``PLACE.image`` beside it."""
    if shutil.which(EXT4[0]) is None:
        pytest.skip(f"no {EXT4[0]}")
    image = image_of(place)
    with image.open("wb") as stream:
        stream.truncate(megabytes * 2**20)
    _call(*EXT4, image)
    with _mounted(place, "-o", f"loop{options}", image):
        place.chmod(0o777)
        shutil.rmtree(place / "lost+found")
        yield place


def image_of(place: Path) -> Path:
    """Where the bytes of an ext4 lie."""
    return place.with_name(f"{place.name}.image")


@contextmanager
def after_power_loss(place: Path, seen: Path) -> Iterator[Path]:
    """The ext4 at ``place`` as it would be found now if the power failed, at ``seen``.

    Its image holds what has reached the disk; what waits in memory to be written is lost.
    """
    image = image_of(seen)
    _call("cp", "--sparse=always", image_of(place), image)
    with _mounted(seen, "-o", "loop", image):
        yield seen
    image.unlink()


@contextmanager
def _mounted(place: Path, *how: object) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    _call("mount", *how, place)
    try:
        yield
    finally:
        _call("umount", "-l", place)


def leave(place: str | Path, room: int) -> None:
    """Take all space of a file system but about ``room`` bytes, less than a block."""
    free = os.statvfs(place)
    take = free.f_bavail * free.f_frsize - room
    with Path(place, FILLER).open("ab") as stream, contextlib.suppress(OSError):
        at = stream.tell()
        if take > 0:
            os.posix_fallocate(stream.fileno(), at, take)
        os.fsync(stream.fileno())
        while room == 0:  # what the file system keeps for its own books
            stream.seek(0, os.SEEK_END)
            stream.write(bytes(4096))
            stream.flush()
            os.fsync(stream.fileno())
