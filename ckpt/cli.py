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
        as_json = "--json" in (kwargs.get("args") or (args[0] if args else None) or sys.argv)
        try:
            result = super().main(*args, **{**kwargs, "standalone_mode": False})
        except CkptError as error:
            _report(error, as_json=as_json)
            sys.exit(EXIT_FAILED)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(EXIT_FAILED)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            log = write_bug_log(error)
            click.echo(f"bug in ckpt: {type(error).__name__}: {error}; details in {log}", err=True)
            sys.exit(EXIT_BUG)
        sys.exit(result if isinstance(result, int) else 0)


def _report(error: CkptError, *, as_json: bool) -> None:
    click.echo(f"error: {error}", err=True)
    if as_json:
        click.echo(json.dumps(error.facts()))


def _emit(result: Any, *, as_json: bool) -> None:  # noqa: ANN401 - any report of ours
    """Print a report: its ``as_dict()`` for machines, its ``as_text()`` for people."""
    click.echo(json.dumps(result.as_dict(), default=str) if as_json else result.as_text())


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("--quiet", is_flag=True, help="Print no progress.")
a_path = click.Path(path_type=Path)


class _Iteration(click.ParamType):
    """``latest``, ``release`` or a number."""

    name = "latest|release|N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - click's signature
        """The word or the number; a usage error for anything else."""
        if value in {"latest", "release"} or isinstance(value, int):
            return value
        if not str(value).isdigit():
            self.fail(f"{value!r} is neither 'latest', 'release' nor a number", param, ctx)
        return int(value)


class _Size(click.ParamType):
    """A number of bytes, with a unit or without."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - click's signature
        """The number of bytes; a usage error for what is no size."""
        from ckpt.config import parse_size  # noqa: PLC0415 - keeps --help instant

        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


iteration_option = click.option(
    "--iteration",
    type=_Iteration(),
    default="latest",
    show_default=True,
    help="Which iteration of a run; 'latest' is the one that the run's tracker file names.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Take a model from the end of Megatron training to an OpenAI-compatible endpoint.

    Results go to stdout (with --json for machines), progress and errors to stderr.
    Exit codes: 0 done, 1 known error or failed validation, 2 wrong usage, 3 a bug in
    ckpt, 130 interrupted.
    """


@main.command()
@click.argument("path", type=a_path)
@iteration_option
@json_option
def inspect(path: Path, iteration: Any, *, as_json: bool) -> None:  # noqa: ANN401 - int or word
    """Say what PATH holds: a training checkpoint in any known format, or a converted model.

    Prints format, iteration, parallel sizes, family, element types, parameters and whether
    the checkpoint can be converted. No tensor is read.
    """
    from ckpt.inspection import inspect_directory  # noqa: PLC0415 - keeps --help instant

    _emit(inspect_directory(path, iteration=iteration), as_json=as_json)


@main.command()
@click.argument("source", type=a_path)
@click.argument("output", type=a_path)
@iteration_option
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bf16", "fp16", "fp32"]),
    default="keep",
    show_default=True,
    help="Element type to write; 'keep' copies every tensor as it is.",
)
@click.option(
    "--max-shard-size",
    type=_Size(),
    default="5GB",
    show_default=True,
    help="Largest weight file, such as 5GB or 512MiB.",
)
@click.option("--tokenizer", type=a_path, help="Directory whose tokenizer files are copied.")
@click.option("--family", help="Take this family instead of finding it, such as mistral.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="True size of the vocabulary.")
@click.option(
    "--mtp",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="Layers that predict further tokens: write them, or leave them out.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set or replace one training argument; may be repeated.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier output of ckpt.")
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be done, and stop.")
@json_option
@quiet_option
def convert(
    source: Path, output: Path, *, iteration: Any, only_plan: bool, as_json: bool, quiet: bool,  # noqa: ANN401
    **values: Any,  # noqa: ANN401 - fields of ConvertOptions
) -> None:  # fmt: skip
    """Convert the training checkpoint SOURCE to a Hugging Face directory OUTPUT.

    OUTPUT appears complete or not at all. A run that was interrupted goes on where it was
    when the same command is given again.
    """
    from ckpt.config import ConvertOptions, parse_options  # noqa: PLC0415 - keeps --help instant
    from ckpt.convert import convert_checkpoint, plan_conversion  # noqa: PLC0415

    options = parse_options(ConvertOptions, values)
    if only_plan:
        _emit(plan_conversion(source, options, iteration=iteration), as_json=as_json)
        return
    progress = Terminal(quiet=quiet)
    report = convert_checkpoint(source, output, options, iteration=iteration, progress=progress)
    _emit(report, as_json=as_json)
