"""A look at a pickle's opcodes before it is loaded: none may claim more than the file holds.

The unpickler of CPython allocates what an opcode's length or memo index says before it looks
for the bytes (Modules/_pickle.c), so that a file of twenty bytes can ask for gigabytes. The
table is that of Python's pickletools, protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmap import mmap

    Buffer = bytes | mmap

_LENGTH_BYTES = {  # of the length that stands before the value
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_STOP, _FRAME, _LONG_BINPUT, _PUT = b".", b"\x95", b"r", b"p"
_BY_NAME = {opcode.name: opcode for opcode in pickletools.opcodes}
_OPCODES = {opcode.code.encode("latin1"): opcode for opcode in pickletools.opcodes}


def _plain_run() -> re.Pattern[bytes]:
    """Matches many opcodes at once whose arguments are of a fixed size and ask for nothing."""
    sizes: dict[int, bytes] = {}
    for code, opcode in _OPCODES.items():
        size = 0 if opcode.arg is None else opcode.arg.n
        if size >= 0 and code not in {_STOP, _FRAME, _LONG_BINPUT}:
            sizes[size] = sizes.get(size, b"") + re.escape(code)
    groups = [b"[%b].{%d}" % (codes, size) if size else b"[%b]+" % codes
              for size, codes in sorted(sizes.items())]  # fmt: skip
    return re.compile(b"(?:" + b"|".join(groups) + b"){1,1000}", re.DOTALL)


_PLAIN_RUN = _plain_run()


def pickle_end(data: Buffer, start: int = 0) -> int:
    """Where the pickle that begins at ``start`` ends.

    Raises ValueError for an opcode whose value reaches past the data, or that numbers more
    objects than the data has bytes.
    """
    at, stop = start, len(data)
    while at < stop:
        while found := _PLAIN_RUN.match(data, at):
            at = found.end()
        code = data[at : at + 1]
        at += 1
        if code == _STOP:
            return at
        opcode = _OPCODES.get(code)
        if opcode is None or opcode.arg is None:
            break
        size = opcode.arg.n
        if size in _LENGTH_BYTES:
            width = _LENGTH_BYTES[size]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif size == pickletools.UP_TO_NEWLINE:
            at = _behind_lines(data, at, code)
        else:
            _check_claim(code, int.from_bytes(data[at : at + size], "little"), stop - at, stop)
            at += size
    raise ValueError("the pickle has no end, or claims more than the file holds")


def _check_claim(code: bytes, value: int, rest: int, whole: int) -> None:
    if value > (rest if code == _FRAME else whole):
        raise ValueError(f"the pickle claims {value} bytes or objects, more than the file holds")


def _behind_lines(data: Buffer, at: int, code: bytes) -> int:
    lines = 2 if _OPCODES[code].name in {"GLOBAL", "INST"} else 1
    for _ in range(lines):
        end = data.find(b"\n", at)
        if end < 0:
            return len(data)
        if code == _PUT:
            _check_claim(code, int(data[at : min(end, at + 20)]), 0, len(data))
        at = end + 1
    return at
