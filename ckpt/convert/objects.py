"""Objects of a store as sources: many bytes come in parts side by side, few through kept blocks."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpt.errors import SourceError
from ckpt.storage import as_object, beside, to_location

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt.storage import Stamp
    from ckpt.storage.store import Store

_BLOCK_BYTES = 2**20  # rows that are read one by one lie close together
_BLOCKS = 32
_AT_ONCE = 16


class Objects:
    """The source's objects by URL; looked at when first read, and again when asked."""

    def __init__(self) -> None:
        """Nothing was looked at."""
        self._roots: dict[str, Path] = {}
        self._stamps: dict[str, Stamp] = {}
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def _place(self, file: str) -> tuple[Store, str]:
        protocol = file.partition("://")[0]
        if protocol not in self._roots:
            self._roots[protocol] = to_location(file)
            as_object(self._roots[protocol]).store.forget()
        place = as_object(beside(self._roots[protocol], file))
        return place.store, place.key

    def stamp(self, file: str) -> Stamp:
        """Size and state of an object when it was first asked for; FileNotFoundError if gone."""
        if file not in self._stamps:
            store, key = self._place(file)
            self._stamps[file] = store.stamp(key)
        return self._stamps[file]

    def stamps_now(self, files: Sequence[str]) -> Iterator[tuple[str, Stamp | None]]:
        """The stamps of objects as they are now, None for one that is gone."""
        places = [self._place(file) for file in files]
        for store in {id(store): store for store, _ in places}.values():
            store.forget()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            yield from zip(files, threads.map(_stamp_now, places), strict=True)

    def read_into(self, file: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on; SourceError if there are fewer."""
        size = self.stamp(file)[0]
        if offset + len(view) > size:
            raise _short(file, size)
        store, key = self._place(file)
        if len(view) >= _BLOCK_BYTES:
            if store.read_into(key, offset, view) < len(view):
                raise _short(file, size)
            return
        done = 0
        while done < len(view):
            number, start = divmod(offset + done, _BLOCK_BYTES)
            content = self._block(file, number, size)[start : start + len(view) - done]
            if not content:
                raise _short(file, size)
            view[done : done + len(content)] = content
            done += len(content)

    def _block(self, file: str, number: int, size: int) -> bytes:
        content = self._blocks.pop((file, number), None)
        if content is None:
            store, key = self._place(file)
            start = number * _BLOCK_BYTES
            content = store.read(key, start, min(start + _BLOCK_BYTES, size))
            if len(self._blocks) >= _BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks[file, number] = content
        return content


def _stamp_now(place: tuple[Store, str]) -> Stamp | None:
    store, key = place
    try:
        return store.stamp(key)
    except FileNotFoundError:
        return None


def _short(file: str, size: int) -> SourceError:
    return SourceError(
        "the object ends early: it changed while it was being converted",
        file=file,
        found=f"{size} bytes",
        hint="Wait until its writer has finished; the same command then starts afresh",
    )
