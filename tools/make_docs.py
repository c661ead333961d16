"""Write docs/cli.md from the help texts and docs/support.md from the registries.

``--check`` only compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import make_docs_support

from ckpt.cli import main as ckpt

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent.parent / "docs"
TARGET = DOCS / "cli.md"
WIDTH = 88
TOP = """\
# Commands

Written by `make docs` from the help texts; edit those, not this page.
"""


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below ``group`` by its full name, in the order of ``--help``."""
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def help_text(path: str, command: click.Command) -> str:
    """The help text at a fixed width."""
    context = command.context_class(
        command,
        info_name=path,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    return command.get_help(context)


def render() -> str:
    """The whole page."""
    parts = [TOP, _section("ckpt", ckpt)]
    parts += [_section(path, command) for path, command in commands(ckpt, "ckpt")]
    return "\n".join(parts)


def _section(path: str, command: click.Command) -> str:
    return f"## {path}\n\n```text\n{help_text(path, command)}\n```\n"


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {TARGET: render(), DOCS / "support.md": make_docs_support.render()}


def main() -> int:
    """Write the pages, or say whether they are current."""
    stale = [
        page
        for page, text in pages().items()
        if not page.is_file() or page.read_text(encoding="utf-8") != text
    ]
    if "--check" not in sys.argv[1:]:
        DOCS.mkdir(exist_ok=True)
        for page in stale:
            page.write_text(pages()[page], encoding="utf-8")
        return 0
    for page in stale:
        sys.stderr.write(f"{page} is not current: run make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
