"""Unpickled state brought to plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_DEEPEST = 32


def flatten(
    state: Mapping[str, Any], prefix: str = "", *, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Entries of nested state dicts with dotted names; SourceError for one that has no end."""
    if depth > _DEEPEST:
        raise SourceError(f"dictionaries in dictionaries, more than {_DEEPEST} deep", tensor=prefix)
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.", depth=depth + 1)
        else:
            yield f"{prefix}{key}", value


def namespace(args: object) -> dict[str, Any]:
    """The fields of unpickled training arguments, a namespace or a dictionary."""
    if args is None:
        return {}
    if not isinstance(args, dict) and not hasattr(args, "__dict__"):
        raise SourceError("the training arguments are no namespace", found=repr(args)[:40])
    values = dict(args) if isinstance(args, dict) else dict(vars(args))
    values.pop("args", None)  # what a stub was called with
    return values
