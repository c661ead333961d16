"""Write docs/cli.md from the help texts of the commands; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.cli import main as ckpt

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = Path(__file__).parent.parent / "docs" / "cli.md"
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


def main() -> int:
    """Write the page, or say whether it is current."""
    if "--check" not in sys.argv[1:]:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(render(), encoding="utf-8")
        return 0
    current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == render()
    if not current:
        sys.stderr.write(f"{TARGET} is not current: run make docs\n")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
