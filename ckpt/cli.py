"""The ``ckpt`` command: parse, call one public function, print its result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from ckpt import __version__
from ckpt.errors import EXIT_BUG, EXIT_FAILED, EXIT_INTERRUPTED, CkptError
from ckpt.terminal import Terminal, write_bug_log


class _Group(click.Group):
    """Commands in the order of the work, and one handler for every error."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The order in which the commands are defined."""
        del ctx
        return list(self.commands)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ANN401 - click's signature
        """Run a command; known errors end in one line and exit code 1, bugs in 3."""
        try:
            super().main(*args, **{**kwargs, "standalone_mode": True})
        except CkptError as error:
            _report(error)
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            log = write_bug_log(error)
            click.echo(f"bug in ckpt: {type(error).__name__}: {error}; details in {log}", err=True)
            sys.exit(EXIT_BUG)
        sys.exit(0)


def _report(error: CkptError) -> None:
    click.echo(f"error: {error}", err=True)
    if "--json" in sys.argv:
        click.echo(json.dumps(error.facts()))


def _emit(result: Any, *, as_json: bool) -> None:  # noqa: ANN401 - any report of ours
    """Print a report: its ``as_dict()`` for machines, its ``as_text()`` for people."""
    click.echo(json.dumps(result.as_dict(), default=str) if as_json else result.as_text())


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("--quiet", is_flag=True, help="Print no progress.")
directory = click.Path(path_type=Path, file_okay=False)
existing_directory = click.Path(path_type=Path, file_okay=False, exists=True)
existing_file = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Take a model from the end of Megatron training to an OpenAI-compatible endpoint.

    Results go to stdout (with --json for machines), progress and errors to stderr.
    Exit codes: 0 done, 1 known error or failed validation, 2 wrong usage, 3 a bug in
    ckpt, 130 interrupted.
    """
