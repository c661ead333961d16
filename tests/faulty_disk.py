"""A real file system that fails as it is told to: a directory seen through the kernel's FUSE.

It speaks the kernel's protocol itself (Linux: include/uapi/linux/fuse.h, Documentation/filesystems/
fuse.rst), so nothing has to be installed; mounting needs root. Run as a program it serves; tests
use :func:`faulty`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import stat
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQ10I")
ENTRY = struct.Struct("<QQQQII")
SETATTR = struct.Struct("<IIQQ")
READ = struct.Struct("<QQI")
DIRECT_IO = 1  # what a read or write does here is what the program sees
SIZE = 1 << 3  # of SETATTR
MODE = 1 << 0
MOST = 2**17


class Disk:
    """Serves ``root``; ``faults`` say which calls on which files fail, and how often."""

    def __init__(self, root: str, faults: list[dict[str, Any]]) -> None:
        """A fault has ``call``, a pattern ``file``, and ``errno`` or ``most`` (bytes at a time).

        ``beyond`` is the offset from which on it happens, ``times`` how often, ``flag`` a flag of
        open(2) that it is about.
        """
        self.paths, self.numbers = {1: root}, {root: 1}
        self.faults = faults
        self.open: dict[int, int] = {}

    def node(self, path: str) -> int:
        if path not in self.numbers:
            self.numbers[path] = max(self.paths) + 1
            self.paths[self.numbers[path]] = path
        return self.numbers[path]

    def moved(self, old: str, new: str) -> None:
        for number, path in list(self.paths.items()):
            if path == old or path.startswith(f"{old}/"):
                self.numbers.pop(path, None)
                self.paths[number] = new + path[len(old) :]
                self.numbers[self.paths[number]] = number

    def fault(self, call: str, path: str, at: int = 0, size: int = 0, flags: int = 0) -> int:
        """Raise what this call meets, or say how many bytes it may do."""
        for each in self.faults:
            if each["call"] != call or not re.search(each["file"], path):
                continue
            if (at + size <= each.get("beyond", 0) and size) or not each.get("times", 1):
                continue
            if each.get("flag") and not flags & each["flag"]:
                continue
            each["times"] = each.get("times", -1) - ("times" in each)
            if "most" in each:
                return min(size, int(each["most"]))
            raise OSError(each["errno"], "as told")
        return size

    def attributes(self, path: str) -> bytes:
        s = os.lstat(path)
        times = [getattr(s, f"st_{kind}time_ns") for kind in "amc"]
        return ATTR.pack(
            self.node(path), s.st_size, s.st_blocks, *(t // 10**9 for t in times),
            *(t % 10**9 for t in times), s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        return ENTRY.pack(self.node(path), 0, 0, 0, 0, 0) + self.attributes(path)

    def opened(self, path: str, flags: int, mode: int = 0) -> bytes:
        self.fault("open", path, flags=flags)
        fd = os.open(path, flags & ~(os.O_DIRECT | os.O_EXCL), mode)
        self.open[fd] = fd
        return struct.pack("<QII", fd, DIRECT_IO, 0)

    # What each call answers: its operands are the node's path and the bytes behind the header.

    def init(self, _path: str, body: bytes) -> bytes:
        major, _, ahead = struct.unpack_from("<III", body)
        answer = (major, 31, ahead, 1 << 15, 16, 12, MOST, 1, MOST // 4096, 0, 0)  # big writes
        return struct.pack("<IIIIHHIIHHI28x", *answer)

    def lookup(self, path: str, body: bytes) -> bytes:
        return self.entry(f"{path}/{_text(body)}")

    def getattr(self, path: str, _body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(path)

    def setattr(self, path: str, body: bytes) -> bytes:
        valid, _, _, size = SETATTR.unpack_from(body)
        if valid & SIZE:
            os.truncate(path, size)
        if valid & MODE:
            Path(path).chmod(struct.unpack_from("<I", body, 68)[0])
        return self.getattr(path, body)

    def mkdir(self, path: str, body: bytes) -> bytes:
        path = f"{path}/{_text(body[8:])}"
        self.fault("mkdir", path)
        Path(path).mkdir()
        return self.entry(path)

    def unlink(self, path: str, body: bytes) -> bytes:
        Path(path, _text(body)).unlink()
        self.numbers.pop(f"{path}/{_text(body)}", None)
        return b""

    def rmdir(self, path: str, body: bytes) -> bytes:
        Path(path, _text(body)).rmdir()
        self.numbers.pop(f"{path}/{_text(body)}", None)
        return b""

    def rename(self, path: str, body: bytes, begin: int = 8) -> bytes:
        old, new = (part.decode() for part in body[begin:].split(b"\0")[:2])
        old, new = f"{path}/{old}", f"{self.paths[struct.unpack_from('<Q', body)[0]]}/{new}"
        self.fault("rename", new)
        Path(old).rename(new)
        self.moved(old, new)
        return b""

    def rename2(self, path: str, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "no exchange here")
        return self.rename(path, body, 16)

    def open_file(self, path: str, body: bytes) -> bytes:
        return self.opened(path, struct.unpack_from("<I", body)[0])

    def create(self, path: str, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = f"{path}/{_text(body[16:])}"
        opened = self.opened(path, flags | os.O_CREAT, mode)
        return self.entry(path) + opened

    def read(self, path: str, body: bytes) -> bytes:
        fd, at, size = READ.unpack_from(body)
        return os.pread(fd, self.fault("read", path, at, size), at)

    def write(self, path: str, body: bytes) -> bytes:
        fd, at, size = READ.unpack_from(body)
        most = self.fault("write", path, at, size)
        return struct.pack("<II", os.pwrite(fd, body[40 : 40 + most], at), 0)

    def statfs(self, path: str, _body: bytes) -> bytes:
        s = os.statvfs(path)
        counts = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("<QQQQQIII28x", *counts, s.f_bsize, 255, s.f_frsize)

    def release(self, _path: str, body: bytes) -> bytes:
        os.close(self.open.pop(struct.unpack_from("<Q", body)[0]))
        return b""

    def flush(self, path: str, _body: bytes) -> bytes:
        self.fault("close", path)
        return b""

    def fsync(self, path: str, _body: bytes) -> bytes:
        self.fault("fsync", path)
        return b""

    def opendir(self, path: str, _body: bytes) -> bytes:
        self.fault("open", path)
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, path: str, body: bytes) -> bytes:
        _, at, size = READ.unpack_from(body)
        found = b""
        for number, entry in enumerate(sorted(Path(path).iterdir())[at:], at + 1):
            kind, name = stat.S_IFMT(entry.lstat().st_mode) >> 12, entry.name.encode()
            one = struct.pack("<QQII", 1, number, len(name), kind) + name
            one += b"\0" * (-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found

    def releasedir(self, _path: str, _body: bytes) -> bytes:
        return b""


CALLS: dict[int, Callable[[Disk, str, bytes], bytes]] = {
    1: Disk.lookup, 3: Disk.getattr, 4: Disk.setattr, 9: Disk.mkdir, 10: Disk.unlink,
    11: Disk.rmdir, 12: Disk.rename, 14: Disk.open_file, 15: Disk.read, 16: Disk.write,
    17: Disk.statfs, 18: Disk.release, 20: Disk.fsync, 25: Disk.flush, 26: Disk.init,
    27: Disk.opendir, 28: Disk.readdir, 29: Disk.releasedir, 30: Disk.fsync, 35: Disk.create,
    45: Disk.rename2,
}  # fmt: skip
UNANSWERED = {2, 36, 42}  # forget, interrupt, forget many


def _text(body: bytes) -> str:
    return body.split(b"\0")[0].decode()


def serve(fd: int, disk: Disk) -> None:
    """Answer until the file system is unmounted."""
    while True:
        try:
            message = os.read(fd, MOST + 4096)
        except OSError as error:
            if error.errno in {errno.EINTR, errno.ENOENT, errno.EAGAIN}:
                continue
            return
        _, call, unique, node, *_ = IN.unpack_from(message)
        if call in UNANSWERED:
            continue
        answer, error_number = b"", 0
        try:
            answer = CALLS[call](disk, disk.paths.get(node, ""), message[IN.size :])
        except KeyError:  # a call that this has not: the kernel does without
            error_number = errno.ENOSYS
        except OSError as error:
            error_number = error.errno or errno.EIO
        with contextlib.suppress(FileNotFoundError):  # whoever asked was killed
            os.write(fd, OUT.pack(OUT.size + len(answer), -error_number, unique) + answer)


@contextmanager
def faulty(root: Path, place: Path, *faults: dict[str, Any]) -> Iterator[Path]:
    """See ``root`` at ``place``, with faults; skips where that cannot be mounted."""
    import pytest

    place.mkdir(exist_ok=True)
    order = json.dumps([str(root), str(place), faults])
    server = subprocess.Popen([sys.executable, __file__, order], stdout=subprocess.PIPE, text=True)
    try:
        said = server.stdout.readline() if server.stdout else ""
        if said.strip() != "ready":
            pytest.skip(f"no FUSE here: {said}")
        yield place
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(place), 2)  # MNT_DETACH
        server.kill()
        server.wait()
        if server.stdout:
            server.stdout.close()


def main() -> None:
    """Mount and serve."""
    root, place, faults = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        print(error, flush=True)  # noqa: T201 - the answer
        return
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"faulty", os.fsencode(place), b"fuse.faulty", 0, options):
        print(os.strerror(ctypes.get_errno()), flush=True)  # noqa: T201 - the answer
        return
    print("ready", flush=True)  # noqa: T201 - the answer
    serve(fd, Disk(root, list(faults)))


if __name__ == "__main__":
    main()
