"""One output file as a unit of work: what it needs, how it is written, and its receipt.

A unit can be written by any process on any machine that sees the source and the output. Its
receipt lies beside the file until the whole output is complete; it holds the file's name, size
and SHA-256, and a digest of what the unit was to do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import TYPE_CHECKING

from ckpt.convert.content import Content
from ckpt.convert.read import Files
from ckpt.convert.write import Stream, disk_faults, open_output
from ckpt.manifest import fingerprint, write_json
from ckpt.shards import header_bytes
from ckpt.storage import is_remote, read_ahead, refresh
from ckpt.storage import stamp as stamp_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ckpt.convert.plan import Target
    from ckpt.rectangles import Copy
    from ckpt.storage import Stamp

RECEIPT_SUFFIX = ".receipt.json"
PARTIAL = ".ckpt-partial"
STATE_NAME = "ckpt-stage.json"


@dataclass(frozen=True)
class Unit:
    """One output file: its name and tensors, and the files they come from with their stamps.

    ``plan`` is the fingerprint of the whole conversion, ``root`` the checkpoint's directory, as
    it was given.
    """

    name: str
    targets: tuple[Target, ...]
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    plan: str = ""
    root: str = ""
    allow_nonfinite: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(target.spec.nbytes for target in self.targets)

    def copies(self) -> Iterator[Copy]:
        """All rectangles of its tensors, in the order in which they are read."""
        for target in self.targets:
            for copies in (target.copies, *target.further):
                yield from copies

    def digest(self) -> str:
        """A hash of all that decides the file's bytes; 32 hexadecimal digits."""
        digest = sha256(f"{self.plan} {self.name} {self.allow_nonfinite}\n".encode())
        root = self.root
        for target in self.targets:
            spec = target.spec
            digest.update(f"{spec.name} {spec.dtype} {spec.shape} {target.stored}\n".encode())
            digest.update(f"{target.steps}\n".encode())
            for copies in (target.copies, *target.further):
                lines = [
                    f"{c.file.removeprefix(root)} {c.source} {c.source_pitch} {c.target} "
                    f"{c.target_pitch} {c.rows} {c.width} {c.item} {c.transposed}\n"
                    for c in copies
                ]
                digest.update("".join(lines).encode(errors="surrogateescape"))
        for file, stamp in sorted(self.stamps.items()):
            line = f"{file.removeprefix(root)} {tuple(stamp)}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Written:
    """One finished output file."""

    name: str
    size: int
    sha256: str
    overflowed: dict[str, int] = field(default_factory=dict)
    underflowed: dict[str, int] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)


def write_unit(unit: Unit, directory: Path, advance: Callable[[int], None]) -> Written:
    """Write one safetensors file and then its receipt, or keep the finished one of another run.

    ``advance`` is told the bytes of tensors as they are done. Raises SourceError for what
    cannot be read, has changed, or holds NaN or infinite values that are not allowed;
    OutputError for what cannot be written. Then nothing of the file is left.
    """
    known = read_receipt(directory, unit)
    if known is not None:
        advance(unit.nbytes)
        return known
    with disk_faults(directory / unit.name), Files(unit.stamps) as files:
        content = Content(files, advance, allow_nonfinite=unit.allow_nonfinite)
        with Stream(open_output(directory / unit.name, unit.nbytes)) as stream:
            stream.put_bytes(header_bytes([target.spec for target in unit.targets]))
            files.expect(unit.copies())
            for target in unit.targets:
                content.put(target, stream)
            files.check_unchanged(list(unit.stamps))
            size, digest = stream.close()
        casts = content.casts
        written = Written(
            unit.name, size, digest, casts.overflowed, casts.underflowed, content.nonfinite
        )
        _write_receipt(directory, unit, written)
    return written


def copy_unchanged(source: Path, stamp: Stamp, directory: Path, name: str) -> Written:
    """Copy a file that lies beside the weights, durably; raises as :func:`write_unit` does."""
    file = str(source)
    with disk_faults(directory / name):
        (directory / name).parent.mkdir(exist_ok=True)
        done, total = 0, stamp[0]
        output = open_output(directory / name, total)
        with Files({file: stamp}) as files, Stream(output) as stream:
            while done < total:
                room = stream.room(1)
                count = min(total - done, len(room))
                files.read_into(file, done, room[:count])
                stream.put(count)
                done += count
            files.check_unchanged([file])
            size, digest = stream.close()
    return Written(name, size, digest)


def own_place(directory: Path) -> Path:
    """Where receipts and the like lie: beside the files, in a store in a directory of their own."""
    return directory / PARTIAL if is_remote(directory) else directory


def receipt_file(directory: Path, name: str) -> Path:
    """The receipt of an output file."""
    return own_place(directory) / f"{name}{RECEIPT_SUFFIX}"


def look_ahead(directory: Path, names: Sequence[str]) -> None:
    """See what others have written meanwhile, and fetch the receipts of these files at once."""
    refresh(directory)
    read_ahead([receipt_file(directory, name) for name in names])


def _write_receipt(directory: Path, unit: Unit, written: Written) -> None:
    state = stamp_of(directory / unit.name)[1]
    receipt = {**asdict(written), "unit": unit.digest(), "state": state}
    receipt["seal"] = fingerprint(receipt)
    write_json(receipt_file(directory, unit.name), receipt)


def read_receipt(directory: Path, unit: Unit) -> Written | None:
    """What another run left of this file, if it is whole and was written by the same plan.

    A file that was touched since is read, and is whole if its SHA-256 is still the same; an
    object that was written again since is not.
    """
    file = directory / unit.name
    try:
        content = json.loads(receipt_file(directory, unit.name).read_bytes())
        seal = content.pop("seal")
        size, state = stamp_of(file)
        same = seal == fingerprint(content) and content["unit"] == unit.digest()
        same = same and not file.is_symlink() and file.is_file() and content["size"] == size
        if same and content["state"] != state:
            same = not is_remote(file) and file_digest(file) == content["sha256"]
        kept = {each.name: content[each.name] for each in fields(Written)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return Written(**kept) if same else None


def file_digest(file: Path) -> str | None:
    """The SHA-256 of a file, read in bounded memory; None for what cannot be read."""
    digest, buffer = sha256(), bytearray(2**20)
    try:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError:
        return None
    return digest.hexdigest()
