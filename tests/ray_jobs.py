"""What tests put in the place of a unit's writing on a Ray cluster, and the cluster itself."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

from ckpt.convert import read, units


@contextlib.contextmanager
def cluster(nodes):
    """A cluster of ``nodes`` on loopback with one CPU each, and its address; this process joins."""
    import ray
    from ray.cluster_utils import Cluster

    each = [
        {"num_cpus": 1, "node_ip_address": f"127.0.0.{2 + n}", "object_store_memory": 80 * 2**20}
        for n in range(nodes)
    ]
    found = Cluster(initialize_head=True, head_node_args={**each[0], "include_dashboard": False})
    try:
        for node in each[1:]:
            found.add_node(**node)
        found.wait_for_nodes()
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        yield found.address
    finally:
        ray.shutdown()
        found.shutdown()


def write_or_die(unit, directory, advance):
    """Write a unit; the third file's worker is killed in the midst of its first attempt."""
    marker = Path(tempfile.gettempdir()) / f"{unit.plan}.died"
    if "-00003-" in unit.name and not marker.exists():
        original = read.fill_window

        def fatal(*values, **named):
            original(*values, **named)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        read.fill_window = fatal
    return units.write_unit(unit, directory, advance)


def write_or_always_die(unit, directory, advance):
    """Write a unit; each attempt at the third file kills its worker."""
    if "-00003-" in unit.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return units.write_unit(unit, directory, advance)


def write_slowly(unit, directory, advance):
    """Write a unit, half a second late."""
    time.sleep(0.5)
    return units.write_unit(unit, directory, advance)
