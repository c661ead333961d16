"""Models that transformers built before, kept on disk: names and shapes, a file for each.

A memo answers only for the very same question: its name is a hash of config.json's content, of
the versions of transformers, torch and Python, of the sizes and times of the source files that
build the model, and of the code here that asks. Nothing of the libraries is imported for that.
A memo that cannot be read, was cut short or changed, or belongs to another user is none.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import tempfile
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

KEPT_FILES = 64
KEPT_BYTES = 64 * 2**20  # a model of 256 experts takes some megabytes
_LIBRARIES = ("transformers", "torch")
_DIGITS = 16
_OF_ELEMENTS = {"dtype", "torch_dtype"}  # they change neither names nor shapes
_FIELDS = ("model_class", "transformers", "stored", "loaded", "tied", "ignored", "prefix")
_BESIDE = re.compile(rb"^\s*from \.\.(\w+)", re.MULTILINE)
_DAMAGE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ModelMemo:
    """Built models under ``root``; every fault of the disk is as if there were no memo."""

    def __init__(self, root: Path) -> None:
        """Memos lie in ``root``/models, which is made when one is kept."""
        self._root = root / "models"

    def knows_libraries(self) -> bool:
        """Whether a model of these very libraries is kept, so that another may be as well."""
        with suppress(OSError):
            return bool(self._libraries) and any(self._root.glob(f"{self._libraries}-*.json"))
        return False

    def load(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was kept for this content of config.json, or None."""
        with suppress(OSError, *_DAMAGE):
            file = self._file(config)
            if file is None:
                return None
            content = _own_content(file)
            digest, _, text = content.partition(b"\n")
            if sha256(text).hexdigest().encode() != digest:
                return None
            found = json.loads(text)
            model = {name: found[name] for name in _FIELDS}
            _check_model(model)
            with suppress(OSError):
                os.utime(file)  # those that are used stay longest
            return model
        return None

    def save(self, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Keep a model; older ones make room."""
        with suppress(OSError, ValueError, TypeError):
            file = self._file(config)
            if file is None:
                return
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(model, separators=(",", ":")).encode()
            content = sha256(text).hexdigest().encode() + b"\n" + text
            number, name = tempfile.mkstemp(dir=self._root, prefix=".", suffix=".part")
            try:
                with os.fdopen(number, "wb") as stream:
                    stream.write(content)
                os.replace(name, file)  # noqa: PTH105 - a name, not a path
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._prune()

    def _file(self, config: Mapping[str, Any]) -> Path | None:
        """The place of the memo for a config.json; None where the libraries are not known."""
        if not self._libraries:
            return None
        package = _package("transformers")
        text = json.dumps(
            {k: v for k, v in config.items() if k not in _OF_ELEMENTS}, sort_keys=True
        )
        digest = sha256(f"{text}\n".encode())
        for name, size, time in _stamps(_model_files(package, str(config.get("model_type", "")))):
            digest.update(f"{name} {size} {time}\n".encode())
        return self._root / f"{self._libraries}-{digest.hexdigest()[: 2 * _DIGITS]}.json"

    @cached_property
    def _libraries(self) -> str:
        """A hash of what builds any model; empty where a library is missing."""
        with suppress(PackageNotFoundError, OSError, LookupError, ImportError, ValueError):
            digest = sha256(
                f"{platform.python_implementation()} {platform.python_version()}".encode()
            )
            for library in _LIBRARIES:
                digest.update(f"{library} {version(library)} {_package(library)}\n".encode())
            own = [Path(__file__), Path(__file__).with_name("metamodel.py")]
            for file in own:
                digest.update(sha256(file.read_bytes()).digest())
            files = [*_python_files(_package("torch"), deep=False), *_shared_files()]
            for name, size, time in _stamps(files):
                digest.update(f"{name} {size} {time}\n".encode())
            return digest.hexdigest()[:_DIGITS]
        return ""

    def _prune(self) -> None:
        """Keep the memos that were used last, and no parts of any that was not finished."""
        held, room = [], KEPT_BYTES
        for entry in os.scandir(self._root):
            if entry.is_file(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                held.append((state.st_mtime_ns, state.st_size, entry.path))
        for number, (_, size, path) in enumerate(sorted(held, reverse=True)):
            room -= size
            if number >= KEPT_FILES or (room < 0 and number):
                Path(path).unlink(missing_ok=True)


def _own_content(file: Path) -> bytes:
    """The content of a plain file that this user alone may write; ValueError for another one."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(file, flags), "rb") as stream:
        state = os.fstat(stream.fileno())
        foreign = hasattr(os, "geteuid") and state.st_uid != os.geteuid()
        if not stat.S_ISREG(state.st_mode) or foreign or state.st_mode & _OTHERS_MAY_WRITE:
            raise ValueError("not a file of this user alone")
        if state.st_size > KEPT_BYTES:
            raise ValueError("larger than any memo")
        return stream.read()


def _check_model(found: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless this is what a built model is written as."""
    texts = [found[key] for key in ("model_class", "transformers", "prefix")]
    texts += [*found["tied"], *found["ignored"]]
    shapes = [*found["stored"].values(), *found["loaded"].values()]
    numbers = [number for shape in shapes for number in shape]
    if not {type(text) for text in texts} <= {str} or not {type(s) for s in shapes} <= {list}:
        raise TypeError("not a model")
    if not {type(number) for number in numbers} <= {int} or min(numbers, default=0) < 0:
        raise ValueError("not the shapes of a model")
    if not found["stored"]:
        raise ValueError("no model")


def _package(library: str) -> Path:
    """The directory of an installed library, which is not imported; LookupError without one."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        raise LookupError(library)
    return Path(spec.origin).parent


def _shared_files() -> Iterator[Path]:
    """The sources of transformers that every model shares."""
    package = _package("transformers")
    yield from _python_files(package, deep=False)
    for part in sorted(package.iterdir()):
        if part.is_dir() and part.name != "models":
            yield from _python_files(part, deep=True)
    yield from _python_files(package / "models" / "auto", deep=True)


def _model_files(package: Path, model_type: str) -> Iterator[Path]:
    """The sources of one model and of those beside it that they name, else of all models."""
    models = package / "models"
    wanted, seen = [model_type.replace("-", "_")], {"auto"}
    if not wanted[0].isidentifier() or not (models / wanted[0]).is_dir():
        yield from _python_files(models, deep=True)  # such as gemma3_text, which is in gemma3
        return
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for file in _python_files(models / name, deep=False):
            yield file
            wanted += [found.decode() for found in _BESIDE.findall(file.read_bytes())]


def _python_files(directory: Path, *, deep: bool) -> Iterator[Path]:
    """Source files in order, with those of directories below if ``deep``."""
    if not directory.is_dir():
        return
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            yield Path(entry.path)
        elif deep and entry.is_dir() and entry.name != "__pycache__":
            yield from _python_files(Path(entry.path), deep=True)


def _stamps(files: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for file in files:
        state = file.stat()
        yield str(file), state.st_size, state.st_mtime_ns
