"""Which part of a conversion this process has: from its options, or from what launched it.

Launchers number the processes that they start in variables of the environment: Slurm's job
arrays and srun (sbatch(1), srun(1)), torchrun (PyTorch, ``docs/source/elastic/run.rst``) and
Kubernetes' Indexed Jobs, which give a number without saying of how many.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeVar

    from ckpt.config import ConvertOptions

    T = TypeVar("T")

_ARRAY = "SLURM_ARRAY_TASK_"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_FLAGS = {"overrides": "set"}
_INDEXED = "JOB_COMPLETION_INDEX"
# Steps that are no srun: batch script, extern, interactive (slurm/slurm.h, SLURM_*_STEP ids).
_SPECIAL_STEPS = 0xFFFFFFF0
_MOST_PARTS = 100_000
_WAY_OUT = "Give --shard-index and --num-shards yourself, or --num-shards 1 for all of it"


@dataclass(frozen=True)
class Share:
    """Part ``index`` (from 0) of ``of`` equal parts; ``origin`` is what said so.

    ``finalize`` is the run that collects the finished parts.
    """

    index: int = 0
    of: int = 1
    origin: str = ""
    finalize: bool = False

    @property
    def partial(self) -> bool:
        """Whether others have parts too."""
        return self.of > 1

    def __str__(self) -> str:
        """The part as people count: ``part 2 of 8``."""
        return f"part {self.index + 1} of {self.of}"

    def options(self) -> str:
        """The options that ask for this part."""
        return f"--shard-index {self.index} --num-shards {self.of}"

    def note(self) -> str:
        """One loud line: which part, why, and how to have all of it."""
        if not self.origin:
            return f"{self} ({self.options()}); --num-shards 1 converts all of it here"
        why = f"{self} ({self.options()}), from {self.origin}"
        return f"{why}; --num-shards 1 converts all of it here"

    def of_items(self, items: Iterable[T], size: Callable[[T], int]) -> list[T]:
        """This part of ``items``: they are dealt out, largest first, to whoever has least.

        Every process finds the same parts; ties go by the items' order.
        """
        return deal(items, size, self.of)[self.index]


WHOLE = Share()


def deal(items: Iterable[T], size: Callable[[T], int], count: int) -> list[list[T]]:
    """``items`` in ``count`` parts of about equal size, each part in the items' order.

    >>> deal([5, 9, 4, 3, 2, 1], int, 2)
    [[9, 3], [5, 4, 2, 1]]
    """
    known = list(items)
    loads = [(0, part) for part in range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(known)), key=lambda number: -size(known[number])):
        load, part = min(loads)
        parts[part].append(number)
        loads[part] = (load + size(known[number]), part)
    return [[known[number] for number in sorted(part)] for part in parts]


def finalize_command(source: Path, output: Path, options: ConvertOptions) -> str:
    """The command that collects the parts of this conversion."""
    words: list[str] = []
    for name, value in vars(options).items():
        if value == getattr(type(options), name, None) or name in {"cache", "workers", "executor"}:
            continue
        flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
        each = value if isinstance(value, tuple) else (value,)
        for item in each:
            words += [flag] if item is True else [flag, str(item)]
    places = [str(source), str(output)]
    if any(place.startswith("-") for place in places):
        return shlex.join(["ckpt", "convert", *words, "--finalize", "--", *places])
    return shlex.join(["ckpt", "convert", *places, *words, "--finalize"])


def choose_share(
    environ: Mapping[str, str],
    *,
    shard_index: int | None = None,
    num_shards: int | None = None,
    finalize: bool = False,
) -> Share:
    """What a command is to do: its part, the whole, or to collect the parts.

    Raises OptionsError as :func:`find_share` does, and for a part that is to finalize.
    """
    if not finalize:
        return find_share(shard_index, num_shards, environ)
    if shard_index is not None or (num_shards or 1) > 1:
        raise OptionsError(
            "--finalize collects all parts",
            hint="Give it without --shard-index and --num-shards, once all parts are written",
        )
    return Share(finalize=True)


def find_share(index: int | None, count: int | None, environ: Mapping[str, str]) -> Share:
    """The share that ``--shard-index`` and ``--num-shards`` name, else that of the launcher.

    Raises OptionsError for numbers that cannot be, and where an index is known without its
    count.
    """
    if index is not None and count is None:
        raise OptionsError("--shard-index needs --num-shards", hint="Say of how many parts")
    if count is not None and count < 1:
        raise OptionsError("--num-shards must be at least 1", found=count)
    if count == 1 and not index:
        return WHOLE
    if index is not None and count is not None:
        return _checked(Share(index, count), "--shard-index")
    found = _launched(environ, count)
    if count is not None and not found.origin:
        raise OptionsError(
            "--num-shards needs --shard-index",
            hint=f"Say which part this is, from 0 to {count - 1}; nothing that launched this "
            "process says it",
        )
    if count is not None and found.of != count:
        raise OptionsError(
            "--num-shards does not fit what launched this process",
            expected=f"{found.of}, from {found.origin}",
            found=count,
            hint=_WAY_OUT,
        )
    return found if found.partial else WHOLE


def _launched(environ: Mapping[str, str], count: int | None) -> Share:
    """The share by the environment: of a job array, times that of the tasks in each job."""
    inner = next((share for find in _INNER if (share := find(environ))), None)
    shares = [share for share in (_array(environ), inner) if share is not None]
    if not shares:
        return _indexed_job(environ, count)
    whole = shares[0]
    for share in shares[1:]:
        whole = Share(
            whole.index * share.of + share.index,
            whole.of * share.of,
            f"{whole.origin} and {share.origin}",
        )
    return whole


def _array(environ: Mapping[str, str]) -> Share | None:
    """A job array: its least task is part 1, the next ones follow in its steps."""
    if f"{_ARRAY}ID" not in environ:
        return None
    task, count, least = (_number(environ, f"{_ARRAY}{part}") for part in ("ID", "COUNT", "MIN"))
    step = _number(environ, f"{_ARRAY}STEP", default=1)
    last = least + (count - 1) * step
    most = _number(environ, f"{_ARRAY}MAX", default=last)
    at, rest = divmod(task - least, step) if step else (0, 1)
    if rest or most != last or not 0 <= at < count:
        raise OptionsError(
            "this job array is a list with gaps: its variables do not tell which part a task has",
            expected=f"tasks {least} to {last} in steps of {step} for {_ARRAY}COUNT={count}",
            found=f"task {task}, {_ARRAY}MAX={most}",
            hint=f"Give --shard-index ${_ARRAY}ID --num-shards N, with the N of the whole array",
        )
    return Share(at, count, f"{_ARRAY}ID={task}")


def _srun(environ: Mapping[str, str]) -> Share | None:
    """A task of an srun step; the batch script itself has the same variables and is none."""
    if "SLURM_PROCID" not in environ:
        return None
    step = environ.get("SLURM_STEP_ID")
    if step is None and "SLURM_JOB_ID" in environ:
        return None
    if step is not None and _number(environ, "SLURM_STEP_ID") >= _SPECIAL_STEPS:
        return None
    counts = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
    return _numbered(environ, "SLURM_PROCID", counts[0] if counts else "SLURM_NTASKS")


def _torchrun(environ: Mapping[str, str]) -> Share | None:
    """A process of torchrun, which may itself have been started by srun."""
    return _ranked(environ) if _TORCHRUN in environ else None


def _ranked(environ: Mapping[str, str]) -> Share | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return _numbered(environ, "RANK", "WORLD_SIZE")


# Innermost first: torchrun under srun numbers its own processes.
_INNER: Sequence[Callable[[Mapping[str, str]], Share | None]] = (_torchrun, _srun, _ranked)


def _indexed_job(environ: Mapping[str, str], count: int | None) -> Share:
    if _INDEXED not in environ:
        return WHOLE
    index = _number(environ, _INDEXED)
    if count is None:
        raise OptionsError(
            f"{_INDEXED}={index} names one part of this Indexed Job, and nothing says of how many",
            hint="Give --num-shards, the job's completions; --num-shards 1 converts all of it",
        )
    return _checked(Share(index, count, f"{_INDEXED}={index}"), _INDEXED)


def _numbered(environ: Mapping[str, str], index: str, count: str) -> Share:
    share = Share(_number(environ, index), _number(environ, count))
    return replace(_checked(share, index), origin=f"{index}={share.index}")


def _checked(share: Share, name: str) -> Share:
    if share.of > _MOST_PARTS:
        raise OptionsError(
            "too many parts", expected=f"at most {_MOST_PARTS:,}", found=f"{share.of:,}"
        )
    if not 0 <= share.index < share.of:
        raise OptionsError(
            f"{name} is not one of the parts",
            expected=f"0 to {share.of - 1}",
            found=share.index,
            hint="Parts are counted from 0",
        )
    return share


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's whole number; OptionsError where it is none, or absent without a default."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdecimal():
        raise OptionsError(
            f"cannot tell this process's part: {name} is "
            + ("not set" if text is None else "no whole number"),
            found=text,
            hint=_WAY_OUT,
        )
    return int(text)
