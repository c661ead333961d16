"""Builtins that a pickle may call, in forms that make nothing larger than what it holds."""

from __future__ import annotations

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
