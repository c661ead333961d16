"""Build the wheel, look into it, and use it from an environment that has nothing of the clone.

The heavy libraries come from the environment that runs this script; ``ckpt`` itself must
come from the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def build(directory: Path) -> Path:
    """The wheel of the clone, built by pip."""
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(directory), str(ROOT)], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def missing_files(wheel: Path) -> set[str]:
    """What the clone's package holds and the wheel does not."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    listed = subprocess.run(
        ["git", "ls-files", "ckpt"],  # noqa: S607 - git is found by its name
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return set(listed.stdout.split()) - packed


def install(wheel: Path, directory: Path) -> Path:
    """A new environment with the wheel, which sees the other libraries; its python."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "install", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    site = f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    # A plain path file: the editable clone in that directory is not followed from here.
    libraries = directory / "lib" / site / "libraries.pth"
    libraries.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def use(python: Path, directory: Path) -> None:
    """Inspect and convert the example with the installed command, far from the clone."""
    where = "import ckpt, pathlib; print(pathlib.Path(ckpt.__file__).parent)"
    source = ROOT / "examples" / "llama-tp2pp2"
    found = _output(python, "-c", where, directory=directory).strip()
    if python.parent.parent not in Path(found).parents:
        sys.exit(f"ckpt was imported from {found}, not from the wheel")
    command = python.parent / "ckpt"
    print(_output(command, "--version", directory=directory), end="")
    print(_output(command, "inspect", source, directory=directory), end="")
    print(_output(command, "convert", source, directory / "model", directory=directory), end="")
    print(_output(command, "inspect", directory / "model", directory=directory), end="")


def _output(*command: object, directory: Path) -> str:
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=directory, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    """Build, look, install, use; any failure is an exit code."""
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        wheel = build(directory)
        missing = missing_files(wheel)
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        use(install(wheel, directory / "env"), directory)
        print(f"{wheel.name}: complete, installed and used")


if __name__ == "__main__":
    main()
