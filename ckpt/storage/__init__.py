"""Where files lie: a path of this machine, or a place in an object store.

A text with ``://`` names a store, through fsspec (``s3://bucket/run``); any other one is a path,
which no code of a store ever touches. No local path's text holds ``://``, since pathlib folds
the slashes, so that plain text can name either.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from ckpt.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from ckpt.storage.paths import ObjectPath

MARK = "://"
T = TypeVar("T")
R = TypeVar("R")
_AT_ONCE = 8
Stamp = tuple[int, int | str]  # of a file: its bytes, and its time or state
_COPY = dict.fromkeys(("gs", "gcs"), "gcloud storage rsync -r") | {"s3": "aws s3 sync"}
_LOCAL = ("file://", "local://")


class Scanned(NamedTuple):
    """An entry of a directory: its name, whether it is a directory, and its bytes."""

    name: str
    is_directory: bool
    size: int


def to_location(value: object) -> Path:
    """The path that a command line or a file names; in a store, an object that acts as one.

    What acts as a path has the part of pathlib's interface that is used here and nothing that
    takes a file descriptor. Raises OptionsError for an unknown store, for one whose library is
    not installed, and for a URL that holds credentials.
    """
    text = str(value)
    for prefix in _LOCAL:
        text = text.removeprefix(prefix)
    if MARK not in text:
        return value if isinstance(value, Path) else Path(text)
    from ckpt.storage.paths import open_location  # noqa: PLC0415 - only where a store is named

    # Typed as what it stands in for: every module would else name both kinds.
    return cast("Path", open_location(text))


def is_remote(location: object) -> bool:
    """Whether a location, or a text that names one, is in an object store."""
    return not isinstance(location, Path) and MARK in str(location)


def as_object(location: Path) -> ObjectPath:
    """The same location under its true type; only where :func:`is_remote` says so."""
    return cast("ObjectPath", location)


def require_local(location: Path | None, reader: str) -> None:
    """Raise OptionsError where ``reader``, which needs files of this machine, is given a store."""
    if location is not None and is_remote(location):
        raise _elsewhere(str(location), reader)


def to_local(value: object, reader: str) -> Path:
    """The path that a command line names for ``reader``, which needs files of this machine.

    Raises OptionsError for a store, whose library is not asked for.
    """
    text = str(value)
    for prefix in _LOCAL:
        text = text.removeprefix(prefix)
    if MARK in text:
        raise _elsewhere(text, reader)
    return value if isinstance(value, Path) else Path(text)


def _elsewhere(url: str, reader: str) -> OptionsError:
    name = url.rstrip("/").rpartition("/")[2] or "model"
    program = _COPY.get(url.partition(MARK)[0])
    return OptionsError(
        f"{reader} reads files of this machine only, not an object store",
        file=url,
        hint=f"Copy it first: {program} {url} {name}" if program else "Copy it to a path first",
    )


def beside(known: Path, text: str) -> Path:
    """The location called ``text``, on the same machine or in the same store as ``known``."""
    if not is_remote(known):
        return Path(text)
    return cast("Path", as_object(known).named(text))


def refresh(location: Path) -> None:
    """Forget what was seen of a store earlier; paths of this machine are always looked at anew."""
    if is_remote(location):
        as_object(location).store.forget()


def list_whole(directory: Path) -> None:
    """List everything below a directory of a store at once, since it will all be asked for."""
    if is_remote(directory):
        as_object(directory).list_whole()


def read_ahead(files: list[Path]) -> None:
    """Fetch small files of a store side by side; reading them then costs no further request."""
    if files and is_remote(files[0]):
        as_object(files[0]).store.fetch_small([as_object(file).key for file in files])


def ahead(work: Callable[[T], R], items: Iterable[T], place: Path) -> Iterator[R]:
    """What ``work`` makes of each item, in order.

    Where ``place`` is in a store, a few are at work side by side, since each waits for answers.
    """
    if not is_remote(place):
        yield from map(work, items)
        return
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - only for a store

    threads = ThreadPoolExecutor(_AT_ONCE)
    try:
        running: list[Future[R]] = []
        for item in items:
            running.append(threads.submit(work, item))
            if len(running) > _AT_ONCE:
                yield running.pop(0).result()
        while running:
            yield running.pop(0).result()
    finally:
        threads.shutdown(cancel_futures=True)


def scan(directory: Path) -> Iterator[Scanned]:
    """The entries of a directory with their sizes, in no order."""
    if is_remote(directory):
        for entry in as_object(directory).entries():
            yield Scanned(entry.name, entry.is_directory, entry.size)
        return
    with os.scandir(directory) as entries:
        for found in entries:
            is_directory = found.is_dir()
            yield Scanned(found.name, is_directory, 0 if is_directory else found.stat().st_size)


def stamps_below(directory: Path, depth: int = 4) -> Iterator[tuple[str, Stamp]]:
    """Every file in a directory and so many levels of others in it, by its path, with its stamp."""
    if is_remote(directory):
        for entry in as_object(directory).entries():
            path = directory / entry.name
            if entry.is_directory:
                yield from stamps_below(path, depth - 1) if depth else ()
            else:
                yield str(path), stamp(path)
        return
    with os.scandir(directory) as entries:
        for found in entries:
            with suppress(FileNotFoundError):  # a link that leads nowhere, or removed this moment
                if not found.is_dir():
                    state = found.stat()
                    yield found.path, (state.st_size, state.st_mtime_ns)
                elif depth:
                    yield from stamps_below(Path(found.path), depth - 1)


def stamp(file: Path) -> Stamp:
    """What tells one state of a file from another: its size, and when or as what it was written.

    In a store that is the object's entity tag with its time.
    """
    if is_remote(file):
        return as_object(file).stamp()
    state = file.stat()
    return state.st_size, state.st_mtime_ns


def lies_in(location: Path, directory: Path) -> bool:
    """Whether a location is a directory, or lies below it."""
    if is_remote(location) or is_remote(directory):
        return f"{location}/".startswith(f"{directory}/")
    return location.resolve().is_relative_to(directory.resolve())


def files_below(directory: Path) -> Iterator[Path]:
    """Every file below a directory, at any depth."""
    if is_remote(directory):
        yield from cast("Iterator[Path]", as_object(directory).files_below())
        return
    yield from (path for path in directory.rglob("*") if not path.is_dir())
