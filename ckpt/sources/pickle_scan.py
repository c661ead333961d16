"""A look at a pickle's opcodes before it is loaded: none may claim more than the file holds.

The unpickler of CPython allocates what an opcode's length or memo index says before it looks
for the bytes (Modules/_pickle.c), so that a file of twenty bytes can ask for gigabytes. The
table is that of Python's pickletools, protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
import re
import sys
from functools import lru_cache
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
_STOP, _FRAME, _LONG_BINPUT, _PUT, _LONG1 = b".", b"\x95", b"r", b"p", b"\x8a"
_OPCODES = {opcode.code.encode("latin1"): opcode for opcode in pickletools.opcodes}
_LINES = {
    code
    for code, opcode in _OPCODES.items()
    if opcode.arg is not None and opcode.arg.n == pickletools.UP_TO_NEWLINE
}
_ENDS_WINDOW = _LINES | {_STOP, _FRAME}  # what a part of a pickle is not enough to judge
_WINDOW_BYTES = 2048
_ALIKE_BYTES = 2**20  # an index is larger, and there is one
_NO_END = "the pickle has no end, or claims more than the file holds"


def _plain_run() -> re.Pattern[bytes]:
    """Matches many opcodes at once whose arguments are of a fixed size and ask for nothing."""
    sizes: dict[int, bytes] = {}
    for code, opcode in _OPCODES.items():
        size = 0 if opcode.arg is None else opcode.arg.n
        if size >= 0 and code not in {_STOP, _FRAME, _LONG_BINPUT}:
            sizes[size] = sizes.get(size, b"") + re.escape(code)
    bare = b"[%b]" % sizes.pop(0)
    forms = [b"[%b]%b" % (codes, b"." * size) for size, codes in sorted(sizes.items())]
    lengths = b"|".join(re.escape(bytes([size])) + b"." * size for size in range(1, 9))
    forms.append(re.escape(_LONG1) + b"(?:%b)" % lengths)
    # What was passed is never tried again where the language can say so, else it is in portions.
    sure, many = (b"+", b"++") if sys.version_info >= (3, 11) else (b"", b"{1,1000}")
    run = b"(?:%b*%b(?:%b))%b%b*%b|%b+%b"
    return re.compile(run % (bare, sure, b"|".join(forms), many, bare, sure, bare, sure), re.DOTALL)


_PLAIN_RUN = _plain_run()


def pickle_end(data: Buffer, start: int = 0) -> int:
    """Where the pickle that begins at ``start`` ends.

    Raises ValueError for an opcode whose value reaches past the data, or that numbers more
    objects than the data has bytes.
    """
    at, stop = start, len(data)
    alike = stop - start < _ALIKE_BYTES
    while at < stop:
        if alike:
            passed, claim = _harmless(data[at : at + _WINDOW_BYTES])
            at += passed
            _check_claim(_LONG_BINPUT, claim, 0, stop)
        elif found := _PLAIN_RUN.match(data, at):
            at = found.end()
        if data[at : at + 1] == _STOP:
            return at + 1
        at = _behind_one(data, at)
    raise ValueError(_NO_END)


@lru_cache(2**12)
def _harmless(window: bytes) -> tuple[int, int]:
    """How many bytes of opcodes lie whole in the window, and the largest number of an object.

    The files of the ranks are alike, and their pickles are much the same.
    """
    at = claim = 0
    while at < len(window):
        if found := _PLAIN_RUN.match(window, at):
            at = found.end()
        code = window[at : at + 1]
        if code not in _OPCODES or code in _ENDS_WINDOW:
            break
        end = at + 5 if code == _LONG_BINPUT else _behind_one(window, at)
        if end > len(window):
            break
        if code == _LONG_BINPUT:
            claim = max(claim, int.from_bytes(window[at + 1 : end], "little"))
        at = end
    return at, claim


def _behind_one(data: Buffer, at: int) -> int:
    """Where the opcode at ``at`` ends, which may be behind the data; ValueError as above."""
    code = data[at : at + 1]
    opcode = _OPCODES.get(code)
    at += 1
    if opcode is None:
        raise ValueError(_NO_END)
    size = 0 if opcode.arg is None else opcode.arg.n
    if size in _LENGTH_BYTES:
        width = _LENGTH_BYTES[size]
        return at + width + int.from_bytes(data[at : at + width], "little")
    if code in _LINES:
        return _behind_lines(data, at, code)
    if code in {_FRAME, _LONG_BINPUT}:
        value = int.from_bytes(data[at : at + size], "little")
        _check_claim(code, value, len(data) - at, len(data))
    return at + size


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
