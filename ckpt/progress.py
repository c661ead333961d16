"""What a long-running stage tells its caller while it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Progress(Protocol):
    """A listener to one stage. All calls come from one thread."""

    def start(
        self, label: str, total: int | None = None, unit: str = "B", *, done: int = 0
    ) -> None:
        """A piece of work begins; ``total`` units of ``unit`` will be reported, if known.

        ``done`` of them were done by an earlier run. Without a unit only the end is told.
        """

    def advance(self, amount: int) -> None:
        """``amount`` more units are done."""

    def finish(self) -> None:
        """The piece of work that began last has ended."""

    def note(self, text: str) -> None:
        """One line worth reading, such as a choice that was made and why."""

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Something of ``name`` happened, for machines; ``facts`` are plain values."""


class Silent:
    """A listener that keeps quiet."""

    def start(
        self, label: str, total: int | None = None, unit: str = "B", *, done: int = 0
    ) -> None:
        """Ignore the start."""

    def advance(self, amount: int) -> None:
        """Ignore the step."""

    def finish(self) -> None:
        """Ignore the end."""

    def note(self, text: str) -> None:
        """Ignore the line."""

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Ignore the event."""
