"""What a machine offers to an engine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.engines import has_gpu
from ckpt.errors import EngineError
from ckpt.serve.tensor_parallel import Devices

if TYPE_CHECKING:
    from ckpt.engines import Engine

_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_SECONDS = 120


def find_devices(engine: Engine) -> Devices:
    """The GPUs that the engine sees, or the cores for an engine that was built for a CPU.

    Raises EngineError when the engine needs a GPU and sees none.
    """
    if engine.is_cpu_build:
        return Devices("CPU cores", count_cores())
    count = _visible_gpus(engine) if has_gpu() else 0
    if not count:
        raise EngineError(
            f"vLLM {engine.version} is not a CPU build, and no GPU is visible",
            file=engine.python,
            hint="Make an environment for the CPU with ckpt engine install vllm --build cpu",
        )
    return Devices("GPUs", count)


def _visible_gpus(engine: Engine) -> int:
    """Asked of the engine itself, since visibility and driver are its own matter."""
    try:
        done = subprocess.run(  # noqa: S603 - the engine's Python
            [str(engine.python), "-c", _COUNT],
            capture_output=True,
            text=True,
            timeout=_COUNT_SECONDS,
            check=True,
        )
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineError(f"cannot count GPUs: {error}", file=engine.python) from error


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_amx(flags: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has matrix tiles, which vLLM then uses in half precision."""
    try:
        return "amx_tile" in flags.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def memory_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
