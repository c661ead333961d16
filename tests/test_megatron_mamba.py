"""The stand-in for Mamba's CUDA kernels computes what Megatron's own code does without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron
HERE = Path(__file__).parent


def test_the_plain_scan_agrees_with_megatrons_own_steps():
    """One token at a time Megatron needs no kernels: 33 steps against one pass."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, str(HERE / "mamba_scan.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    difference, spread = (float(word) for word in done.stdout.split()[-2:])
    assert spread > 0.1
    assert difference <= 2e-5
