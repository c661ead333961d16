"""Check the code with every supported Python that this machine has.

The default tests run on one Python, the one of the environment. For each supported version
that is found, every file is compiled and the modules that need no torch are imported, in
an environment of their own with the light libraries only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
LIBRARIES = ("click", "rich", "pydantic", "PyYAML", "numpy", "safetensors", "httpx")
IMPORT = """
import importlib, pkgutil, ckpt
names = [m.name for m in pkgutil.walk_packages(ckpt.__path__, "ckpt.") if "__main__" not in m.name]
without = {"torch", "transformers"}
failed, needing = {}, []
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        needing.append(name)
        if (error.name or "").split(".")[0] not in without:
            failed[name] = error
    except Exception as error:
        failed[name] = error
print(f"{len(names) - len(needing)} modules imported, {len(needing)} need torch or transformers")
raise SystemExit("; ".join(f"{name}: {error!r}" for name, error in failed.items()) or 0)
"""


def find(version: str) -> str | None:
    """A working python of this version; the name alone may be a shim of an absent one."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += sorted(str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python"))
    for python in candidates:
        if python and _runs(python, "-c", "import ensurepip"):
            return python
    return None


def _runs(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def check(python: str, directory: Path) -> None:
    """Compile and import with this python; the first failure ends the run."""
    environment = directory / "env"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "-qq", "install"]
    subprocess.run([*pip, *LIBRARIES], check=True)
    code = [str(ROOT / name) for name in ("ckpt", "tests", "examples", "tools", "benchmarks")]
    cache = ["-X", f"pycache_prefix={directory / 'cache'}"]
    subprocess.run([python, *cache, "-W", "error", "-m", "compileall", "-q", *code], check=True)
    subprocess.run([python, *cache, "-c", IMPORT], cwd=ROOT, check=True)


def main() -> None:
    """Check every version that is here, and name those that are not."""
    for version in VERSIONS:
        python = find(version)
        if python is None:
            print(f"Python {version}: not on this machine, not checked", flush=True)
            continue
        print(f"Python {version}: ", end="", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            check(python, Path(directory))


if __name__ == "__main__":
    main()
