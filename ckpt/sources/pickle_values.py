"""What a pickle is read from and into: stand-ins, and builtins that it may call.

The builtins are in forms that make nothing larger than what the pickle holds.
"""

from __future__ import annotations

from typing import Any

_PATH_LIMIT = 4096


def to_text(*args: object) -> str:
    """``str`` of text or bytes alone: that of nested lists may be of any length."""
    if not all(isinstance(arg, str | bytes) for arg in args):
        raise TypeError("str of what is no text")
    return str(*args)


def to_bytes(*args: object) -> bytes:
    """``bytes`` or ``bytearray`` of given content, never of a given length."""
    if args and not isinstance(args[0], str | bytes | list | tuple):
        raise TypeError("bytes of a given length and no content")
    return bytes(*args)


def join_path(*parts: str) -> str:
    """The text of a path."""
    if sum(len(part) for part in parts) > _PATH_LIMIT:
        raise ValueError("a path that is longer than paths are")
    return "/".join(parts) or "."


def encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes: as text."""
    return text.encode(encoding if encoding in {"latin1", "utf-8", "ascii"} else "latin1")


class Record:
    """A known data class whose state is a dict. No behaviour, and fast to build."""

    stub_name = "?"


class Fields(list[Any]):
    """A known data class whose state, a dict, is its one item: nothing is fast to build but this.

    As a key it is itself and no other, as any object is.
    """

    __slots__ = ()
    stub_name = "?"
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Unread:
    """A known data class of which nothing is of use here: one object is all of its objects.

    The state, a dict, is emptied, since the unpickler keeps it as long as it works.
    """

    __slots__ = ()
    stub_name = "?"
    __setstate__ = staticmethod(dict.clear)

    def __new__(cls, *_: object) -> Unread:  # noqa: PYI034 - one for all of its classes
        """The same object every time."""
        return _UNREAD_OBJECT


_UNREAD_OBJECT: Unread = object.__new__(Unread)


class Content:
    """A stream whose whole content the unpickler may take at once, without a copy of it.

    Where it could not peek, it would ask for every few bytes by themselves.
    """

    def __init__(self, content: bytes) -> None:
        """Stand before the first byte."""
        self._content, self._at = content, 0

    def peek(self, _size: int) -> bytes:
        """What is left."""
        return self._content[self._at :] if self._at else self._content

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        start, self._at = self._at, self._at + size
        return self._content[start : self._at]

    def readline(self) -> bytes:
        """Up to the end of the line."""
        end = self._content.find(b"\n", self._at) + 1
        return self.read((end or len(self._content)) - self._at)
