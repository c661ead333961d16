"""What the index of a distributed checkpoint says, checked before anything is made of it.

An index of a large model holds hundreds of thousands of places, so each is looked at once.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names

if TYPE_CHECKING:
    from pathlib import Path

    Places = dict[tuple[str, tuple[int, ...] | None], Any]


def checked_places(metadata: Any, index: Path) -> Places:  # noqa: ANN401 - unpickled
    """Where each chunk (by name and start) and each object (by name and None) is stored.

    Raises SourceError unless everything that is read from the index has the form it must. What
    is left out on purpose, such as optimizer state, has its places checked and not its shapes.
    """
    needed = ("state_dict_metadata", "storage_data")
    if not all(isinstance(getattr(metadata, name, None), dict) for name in needed):
        raise SourceError("not the index of a distributed checkpoint", file=index)
    try:
        places = _places(metadata.storage_data, index)
        for name, entry in metadata.state_dict_metadata.items():
            _check_entry(name, entry)
    except (AttributeError, TypeError, ValueError) as error:
        raise SourceError(f"damaged index: {error}", file=index) from error
    return places


def _places(storage: dict[Any, Any], index: Path) -> Places:
    places: Places = {}
    files: set[str] = set()
    for key, place in storage.items():
        name, offset = key.fqn, getattr(key, "offset", None)
        if not isinstance(name, str):
            raise TypeError(f"{name!r:.40} where a name must be")
        start = None if offset is None else tuple(offset)
        for value in (place.offset, place.length, *(start or ())):
            if not isinstance(value, int) or value < 0:
                raise _no_number(value)
        if place.relative_path not in files:
            _check_path(place.relative_path, index, name)
            files.add(place.relative_path)
        places[name, start] = place
    return places


def _check_path(name: Any, index: Path, tensor: str) -> None:  # noqa: ANN401 - unpickled
    if PurePath(name).name != name or name in {"", ".."} or "\0" in name:
        raise SourceError(
            f"the index points outside the directory: {name}", file=index, tensor=tensor
        )


def _check_entry(name: Any, entry: Any) -> None:  # noqa: ANN401 - unpickled
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.40} where a name must be")
    if not hasattr(entry, "chunks") or names.skip_reason(name):
        return
    size = tuple(entry.size)
    _check_numbers(size)
    for chunk in entry.chunks:
        _check_numbers(chunk.offsets)
        _check_numbers(chunk.sizes)
        for start, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True):
            if start + length > whole:
                raise ValueError(f"a part of {name} lies outside it")


def _check_numbers(values: Any) -> None:  # noqa: ANN401 - unpickled
    for value in values:
        if not isinstance(value, int) or value < 0:
            raise _no_number(value)


def _no_number(value: object) -> ValueError:
    return ValueError(f"{value!r:.40} where a size or a position must be")
