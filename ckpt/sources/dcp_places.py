"""What the index of a distributed checkpoint says, checked before anything is made of it.

An index of a large model holds hundreds of thousands of places: they are looked at in columns.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import SourceError
from ckpt.sources import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    Place = tuple[str, int, int]  # file, offset and length in bytes
    Places = dict[tuple[str, tuple[int, ...] | None], Place]
    Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]

_FIRST = itemgetter(0)
_PLACE = itemgetter("relative_path", "offset", "length")


class Stored(NamedTuple):
    """Where things are: each chunk by name and start, each object by name and None.

    ``boxes`` are start and size of the chunks of each tensor that is not left out on purpose.
    """

    places: Places
    boxes: dict[str, Boxes]


def checked_places(metadata: Any, index: Path) -> Stored:  # noqa: ANN401 - unpickled
    """Where each chunk of a tensor that is read, and each object, is stored.

    Raises SourceError unless everything that is read from the index has the form it must. What
    is left out on purpose, such as optimizer state, has its places checked and not its shapes.
    """
    needed = ("state_dict_metadata", "storage_data")
    if not all(isinstance(getattr(metadata, name, None), dict) for name in needed):
        raise SourceError("not the index of a distributed checkpoint", file=index)
    try:
        _check_type(metadata.state_dict_metadata, str, "a name")
        boxes = {
            name: _boxes(name, entry)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks") and not names.skip_reason(name)
        }
        places = _places(metadata.storage_data, boxes, index)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SourceError(f"damaged index: {error}", file=index) from error
    return Stored(places, boxes)


def _places(storage: dict[Any, Any], read: dict[str, Boxes], index: Path) -> Places:
    keys = list(map(_FIRST, storage))
    values = list(map(_PLACE, map(_FIRST, storage.values())))
    fqns = [key["fqn"] for key in keys]
    starts = [key.get("offset") for key in keys]
    _check_type(fqns, str, "a name")
    _check_numbers([number for start in starts if start for number in start])
    _check_numbers([place[1] for place in values])
    _check_numbers([place[2] for place in values])
    files = [place[0] for place in values]
    _check_paths(files, fqns, index)
    return {
        (name, start if start is None else tuple(start)): place
        for name, start, place in zip(fqns, starts, values, strict=True)
        if start is None or name in read
    }


def _check_paths(files: list[Any], fqns: list[str], index: Path) -> None:
    for name in set(files):
        if PurePath(name).name != name or name in {"", ".."} or "\0" in name:
            raise SourceError(
                f"the index points outside the directory: {name}",
                file=index,
                tensor=fqns[files.index(name)],
            )


def _boxes(name: str, entry: Any) -> Boxes:  # noqa: ANN401 - unpickled
    size = tuple(entry.size)
    boxes = [(tuple(fields["offsets"]), tuple(fields["sizes"])) for (fields,) in entry.chunks]
    _check_numbers(size)
    _check_numbers(list(chain.from_iterable(chain.from_iterable(boxes))))
    if not all(_lies_inside(start, length, size) for start, length in boxes):
        raise ValueError(f"a part of {name} lies outside it")
    return boxes


@lru_cache(2**14)
def _lies_inside(start: tuple[int, ...], length: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    sides = zip(start, length, whole, strict=True)
    return all(first + count <= end for first, count, end in sides)


def _check_type(values: Iterable[Any], kind: type, what: str) -> None:
    if not set(map(type, values)) <= {kind}:
        found = next(value for value in values if type(value) is not kind)
        raise TypeError(f"{found!r:.40} where {what} must be")


def _check_numbers(values: Sequence[Any]) -> None:
    if not set(map(type, values)) <= {int} or min(values, default=0) < 0:
        found = next(value for value in values if type(value) is not int or value < 0)
        raise ValueError(f"{found!r:.40} where a size or a position must be")
