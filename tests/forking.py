"""A process that has ckpt loaded and forks a child for each command, to be hurt as asked.

One JSON line of stdin is one command, one of stdout its outcome. A child is a whole run of the
command line with its own process id, streams and file table; only the imports are shared, which
makes hundreds of kills affordable. Used through ``faults.Forks``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from typing import Any

# What touches the file system and is told by the interpreter (docs.python.org: Audit events).
EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir",
    "os.scandir", "os.symlink",
}  # fmt: skip


def watch(places: list[str], at: int | str | None, do: str) -> list[str]:
    """Run ``do`` before one event on a path in ``places``; the list grows with all of them.

    ``at`` is the event's number, or a pattern: then the first one that it fits is meant.
    """
    seen: list[str] = []
    busy = done = False

    def hook(event: str, values: tuple[object, ...]) -> None:
        nonlocal busy, done
        if busy or event not in EVENTS:
            return
        path = values[0] if values else None
        if event == "os.truncate":
            path = places[0]  # its argument is a number
        if not isinstance(path, str | os.PathLike):
            return
        name = os.fspath(path)
        relative = event in {"os.remove", "os.rmdir"} and not name.startswith("/")  # of rmtree
        if not relative and not name.startswith(tuple(places)):
            return
        seen.append(f"{event} {name}")
        if not done and (re.search(at, seen[-1]) if isinstance(at, str) else len(seen) == at):
            busy = done = True
            exec(do, {"os": os})  # noqa: S102 - the fault that the test chose
            busy = False

    sys.addaudithook(hook)
    return seen


def become_mortal() -> None:
    """Lose root's right to read and write whatever the modes of files say (capabilities(7))."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, high words
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0
    for number in (0, 1):
        sets[number] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0


def child(order: dict[str, Any]) -> None:
    """Run one command line; never returns."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(order[name], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        os.dup2(fd, number)
        os.close(fd)
    if order.get("mortal"):
        become_mortal()
    exec(order.get("first", ""), {})  # noqa: S102 - the fault that the test chose
    code = 0
    seen = watch(order["places"], order.get("at"), order.get("do", ""))
    try:
        from ckpt.cli import main

        main(order["arguments"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        code = 99
    if order.get("events"):
        with open(order["events"], "w", encoding="utf-8") as stream:  # noqa: PTH123
            json.dump(seen, stream)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Fork, send the signal when its time has come, wait: code (or minus the signal), seconds."""
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            child(order)
        finally:
            os._exit(98)
    if order.get("delay") is not None:
        time.sleep(order["delay"])
        os.kill(pid, order["signal"])
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - started}


def main() -> None:
    """Load what every run needs, then obey."""
    import ckpt.cli
    import ckpt.convert.checks
    import ckpt.convert.staging
    import ckpt.convert.units  # noqa: F401
    from ckpt.metamodel import build_meta_model

    build_meta_model(json.loads(sys.argv[1]))

    print("{}", flush=True)  # noqa: T201 - ready
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
