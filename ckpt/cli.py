"""The ``ckpt`` command: parse, call one public function, print its result."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckpt import __version__
from ckpt.errors import EXIT_BUG, EXIT_FAILED, EXIT_INTERRUPTED, CkptError, OptionsError
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
            if _is_interruption(error):
                click.echo("interrupted", err=True)
                sys.exit(EXIT_INTERRUPTED)
            log = write_bug_log(error)
            click.echo(f"bug in ckpt: {type(error).__name__}: {error}; details in {log}", err=True)
            sys.exit(EXIT_BUG)
        sys.exit(result if isinstance(result, int) else 0)


def _is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: the interpreter and libraries at times raise anew over it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _report(error: CkptError, *, as_json: bool) -> None:
    click.echo(f"error: {error}", err=True)
    if as_json:
        click.echo(json.dumps({"event": "error", **error.facts()}))


def _emit(result: Any, *, as_json: bool) -> None:  # noqa: ANN401 - any report of ours
    """Print a report: its ``as_dict()`` for machines, its ``as_text()`` for people."""
    click.echo(json.dumps(result.as_dict(), default=str) if as_json else result.as_text())


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("--quiet", is_flag=True, help="Print no progress.")


if TYPE_CHECKING:
    _AnyType = click.ParamType[Any]
    _IntType = click.ParamType[int]
    _PathType = click.ParamType[Path]
else:  # generic only since click 8.4
    _AnyType = _IntType = _PathType = click.ParamType


class _Location(_PathType):
    """A path, or a URL of an object store."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - click's signature
        """The location; OptionsError where its store cannot be reached from here."""
        from ckpt.storage import to_location  # noqa: PLC0415 - keeps --help instant

        del param, ctx
        return to_location(value)


class _Local(_PathType):
    """A path of this machine, for a command that reads no store."""

    name = "path"

    def __init__(self, reader: str) -> None:
        self._reader = reader

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - click's signature
        """The path; OptionsError for a place in a store."""
        from ckpt.storage import to_local  # noqa: PLC0415 - keeps --help instant

        del param, ctx
        return to_local(value, self._reader)


a_path = _Location()


class _Iteration(_AnyType):
    """``latest``, ``release`` or a number."""

    name = "latest|release|N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - click's signature
        """The word or the number; a usage error for anything else."""
        if value in {"latest", "release"} or isinstance(value, int):
            return value
        if not str(value).isdigit():
            self.fail(f"{value!r} is neither 'latest', 'release' nor a number", param, ctx)
        return int(value)


class _Workers(_AnyType):
    """``auto`` or a number."""

    name = "auto|N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - click's signature
        """The word or the number; a usage error for anything else."""
        if value == "auto" or isinstance(value, int):
            return value
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is neither 'auto' nor a number of processes", param, ctx)
        return int(value)


class _Size(_IntType):
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
@click.option(
    "--check",
    "check",
    is_flag=True,
    help="Compare a Hugging Face directory, of any origin, with its index and its config.json.",
)
@json_option
def inspect(path: Path, iteration: Any, *, check: bool, as_json: bool) -> int:  # noqa: ANN401
    """Say what PATH holds: a training checkpoint in any known format, or a converted model.

    PATH may be an s3:// or gs:// URL.

    Prints format, iteration, parallel sizes, family, element types, parameters and whether
    the checkpoint can be converted. No tensor is read.

    With --check, the headers of all weight files are held against the index and against the
    model that transformers builds from config.json; any difference ends in exit code 1.
    """
    from ckpt.inspection import inspect_directory  # noqa: PLC0415 - keeps --help instant
    from ckpt.model_check import check_model  # noqa: PLC0415

    if check:
        checked = check_model(path, cache=_cache_root())
        _emit(checked, as_json=as_json)
        return 0 if checked.passed else EXIT_FAILED
    _emit(inspect_directory(path, iteration=iteration), as_json=as_json)
    return 0


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
@click.option(
    "--reference",
    type=a_path,
    help="Hugging Face directory or config.json of the same model to compare with; its tokenizer "
    "files, token ids and vocabulary size are taken.",
)
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
@click.option(
    "--allow-nonfinite", is_flag=True, help="Convert weights that are NaN or infinite as they are."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier output of ckpt.")
@click.option(
    "--workers",
    type=_Workers(),
    default="auto",
    show_default=True,
    help="Processes that write, each a file at a time; 'auto' goes by CPUs and size.",
)
@click.option(
    "--executor",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help="Who writes: processes of this machine, or the nodes of a Ray cluster.",
)
@click.option(
    "--num-shards",
    type=int,
    help="Of how many parts this process writes one; 1 means all. By default what Slurm "
    "(job array, srun) or torchrun says.",
)
@click.option(
    "--shard-index",
    type=int,
    help="Which part, from 0; by default what Slurm, torchrun or a Kubernetes Indexed Job says.",
)
@click.option(
    "--finalize", is_flag=True, help="Check that all parts are written, and put OUTPUT in place."
)
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be done, and stop.")
@json_option
@quiet_option
def convert(
    source: Path, output: Path, *, iteration: Any, only_plan: bool, as_json: bool, quiet: bool,  # noqa: ANN401
    **values: Any,  # noqa: ANN401 - fields of ConvertOptions, and the share
) -> None:  # fmt: skip
    """Convert the training checkpoint SOURCE to a Hugging Face directory OUTPUT.

    OUTPUT appears complete or not at all. A run that was interrupted goes on where it was
    when the same command is given again. SOURCE, OUTPUT and the directories of --tokenizer and
    --reference may be s3:// or gs:// URLs; docs/object-stores.md says what that needs.

    On many machines, each process writes one part: which one is told by --shard-index and
    --num-shards, or by the job array, srun or torchrun that started it. Then the command is
    given once more, with --finalize.

    With --json, a line is printed for each file of weights as it is finished, and the report
    or the error is the last line.

    The models that OUTPUT is checked against are kept in ~/.cache/ckpt; the environment's
    CKPT_CACHE names another directory, or is off.
    """
    from ckpt.config import ConvertOptions, parse_options  # noqa: PLC0415 - keeps --help instant
    from ckpt.convert import convert_checkpoint, plan_with_proof  # noqa: PLC0415
    from ckpt.convert.share import choose_share  # noqa: PLC0415

    chosen = {name: values.pop(name) for name in ("shard_index", "num_shards", "finalize")}
    options = parse_options(ConvertOptions, {**values, "cache": _cache_root()})
    progress = Terminal(quiet=quiet, as_json=as_json)
    if only_plan:
        planned = plan_with_proof(
            source, options, iteration=iteration, output=output, progress=progress
        )
        _emit(planned, as_json=as_json)
        return
    share = choose_share(os.environ, **chosen)
    report = convert_checkpoint(
        source, output, options, iteration=iteration, progress=progress, share=share
    )
    if as_json:
        progress.event(report.event, report.as_dict())
    else:
        click.echo(report.as_text(progress.told))


@main.command()
@click.argument("source", type=_Local("validate"))
@click.argument("model", type=_Local("validate"))
@iteration_option
@click.option(
    "--reference",
    type=click.Choice(["auto", "recorded", "megatron"]),
    default="auto",
    show_default=True,
    help="Logits recorded in training, or a live Megatron-Core model on the CPU; 'auto' takes "
    "what is recorded in fp32, else what runs.",
)
@click.option("--recorded", type=_Local("validate"), help="File or directory of recorded logits.")
@click.option(
    "--min-cosine", type=float, default=0.9999, show_default=True, help="At every position."
)
@click.option(
    "--max-abs-diff",
    type=float,
    default=1e-3,
    show_default=True,
    help="Of any logit; a share of the logits' spread where that is below 1.",
)
@click.option(
    "--max-positions", type=int, default=512, show_default=True, help="For a live reference."
)
@click.option("--python", type=_Local("validate"), help="Python that has megatron-core.")
@json_option
@quiet_option
def validate(
    source: Path, model: Path, *, iteration: Any, as_json: bool, quiet: bool, **values: Any  # noqa: ANN401
) -> int:  # fmt: skip
    """Compare the logits of the original in SOURCE with those of the converted MODEL.

    Both sides run in fp32. The verdict goes into the model's manifest; a failed one ends in
    exit code 1.
    """
    from ckpt.config import ValidateOptions, parse_options  # noqa: PLC0415 - keeps --help instant
    from ckpt.validate import validate_checkpoint  # noqa: PLC0415

    options = parse_options(ValidateOptions, values)
    progress = Terminal(quiet=quiet)
    report = validate_checkpoint(source, model, options, iteration=iteration, progress=progress)
    _emit(report, as_json=as_json)
    return 0 if report.passed else EXIT_FAILED


@main.command()
@click.argument("model", type=_Local("serve"))
@click.argument("extra_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE_ARGS]")
@click.option(
    "--engine",
    type=click.Choice(["auto", "vllm", "embedded"]),
    default="auto",
    show_default=True,
    help="vLLM, or the embedded engine (transformers serve).",
)
@click.option("--python", type=_Local("serve"), help="Python that has vLLM.")
@click.option(
    "--tensor-parallel",
    default="match",
    show_default=True,
    metavar="match|N",
    help="Tensor-parallel size; 'match' takes the training's where that is possible.",
)
@click.option("--max-model-len", type=int, help="Longest context, in tokens.")
@click.option(
    "--gpu-memory-utilization", type=float, default=0.92, show_default=True, help="Share of a GPU."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="'auto' is the stored type.",
)
@click.option("--served-model-name", help="Name of the model in requests.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--startup-timeout",
    "startup_timeout_seconds",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds until the first answer.",
)
@click.option("--chat-template", type=_Local("serve"), help="Chat template to use; vLLM only.")
@click.option(
    "--api-key",
    envvar="VLLM_API_KEY",
    show_envvar=True,
    help="Key that requests must carry; vLLM only.",
)
@click.option("--foreign", is_flag=True, help="Serve a directory that ckpt did not write.")
@click.option("--check", "only_check", is_flag=True, help="Stop the server once it has answered.")
@json_option
@quiet_option
def serve(model: Path, *, only_check: bool, as_json: bool, quiet: bool, **values: Any) -> None:  # noqa: ANN401
    """Serve the converted MODEL with an OpenAI-compatible API, until interrupted.

    The server is ready when it has answered a real request and, where the original's logits
    were recorded, agrees with them. SIGTERM and SIGINT stop it and all its processes.
    Arguments behind "--" go to the engine as they are.
    """
    from ckpt.config import ServeOptions, parse_options  # noqa: PLC0415 - keeps --help instant
    from ckpt.serve import running_server  # noqa: PLC0415

    options = parse_options(ServeOptions, values)
    _raise_on_sigterm()
    progress, root = Terminal(quiet=quiet), _engines_root()
    with running_server(model, options, progress=progress, engines_root=root) as server:
        _emit(server, as_json=as_json)
        sys.stdout.flush()
        if not only_check:
            server.wait()


@main.command()
@click.argument("pipeline", type=a_path, default="pipeline.yaml")
@click.option("--force", is_flag=True, help="Run every stage, current or not.")
@click.option("--stay", is_flag=True, help="Go on serving until interrupted.")
@json_option
@quiet_option
def run(pipeline: Path, *, force: bool, stay: bool, as_json: bool, quiet: bool) -> int:
    """Run the stages of a PIPELINE file: convert, validate, serve.

    Stages whose manifest is current are skipped. The server is stopped once it has answered
    and agrees with the original, unless --stay is given.
    """
    from ckpt.config import load_pipeline  # noqa: PLC0415 - keeps --help instant
    from ckpt.pipeline import run_pipeline  # noqa: PLC0415

    options = load_pipeline(pipeline)
    if options.convert.cache is None:
        options = replace(options, convert=replace(options.convert, cache=_cache_root()))
    _raise_on_sigterm()
    report = run_pipeline(
        options,
        progress=Terminal(quiet=quiet),
        engines_root=_engines_root(),
        force=force,
        stay=stay,
    )
    _emit(report, as_json=as_json)
    return 0 if report.passed else EXIT_FAILED


@main.group()
def engine() -> None:
    """Install, list and remove the engines that live in environments of their own."""


@engine.command("install")
@click.argument("name", type=click.Choice(["vllm"]))
@click.option("--python", type=a_path, help="Python to make the environment with.")
@click.option(
    "--build", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if a GPU is there."
)
@click.option("--pip-arg", "pip_args", multiple=True, help="Passed on to pip; may be repeated.")
@click.option("--force", is_flag=True, help="Make it anew even if it is there.")
@json_option
@quiet_option
def engine_install(name: str, *, as_json: bool, quiet: bool, **values: Any) -> None:  # noqa: ANN401
    """Make the environment of an engine, exactly pinned."""
    from ckpt.engines import InstallOptions, install_vllm  # noqa: PLC0415 - keeps --help instant

    del name
    _raise_on_sigterm()
    options = InstallOptions(root=_engines_root(), **values)
    found = install_vllm(options, progress=Terminal(quiet=quiet))
    text = f"vLLM {found.version}: {found.python}"
    click.echo(json.dumps(found.as_dict()) if as_json else text)


@engine.command("list")
@json_option
def engine_list(*, as_json: bool) -> None:
    """List the engines that ckpt manages."""
    from ckpt.engines import list_engines  # noqa: PLC0415 - keeps --help instant

    found = list_engines(_engines_root())
    if as_json:
        click.echo(json.dumps([item.as_dict() for item in found]))
        return
    for item in found:
        click.echo(f"{item.name} {item.version} ({item.distribution}): {item.python}")
    if not found:
        click.echo("no engine is installed")


@engine.command("remove")
@click.argument("name", type=click.Choice(["vllm"]))
def engine_remove(name: str) -> None:
    """Delete the environment of an engine."""
    from ckpt.engines import remove_engine  # noqa: PLC0415 - keeps --help instant

    click.echo(f"removed {remove_engine(_engines_root(), name)}")


def _engines_root() -> Path:
    """Where managed environments lie: the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "ckpt" / "engines"


def _cache_root() -> Path | None:
    """Where models that transformers built are kept: CKPT_CACHE, or the user's cache directory.

    None where it is off, and without a home. Raises OptionsError for what is no directory.
    """
    wanted = os.environ.get("CKPT_CACHE", "")
    if wanted.lower() in {"off", "0", "no", "false"}:
        return None
    if wanted.lower() not in {"", "on", "1", "yes", "true"}:
        place = Path(wanted).expanduser()
        if not place.is_absolute() or (place.exists() and not place.is_dir()):
            raise OptionsError(
                "CKPT_CACHE is no directory",
                expected="an absolute path, on or off",
                found=wanted,
                hint="Unset it for ~/.cache/ckpt",
            )
        return place
    base = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # this user has no home directory
        return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "ckpt"
    return None


def _raise_on_sigterm() -> None:
    """Let SIGTERM and a closed terminal end a stage as Ctrl-C does: servers are stopped then."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, interrupt)
