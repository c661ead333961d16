"""What a conversion needs: bytes to read and to write, room, memory and time, said beforehand."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt.convert.rates import ReadRate, hash_rate, measure_reads
from ckpt.errors import OutputError
from ckpt.shards import header_bytes
from ckpt.storage import is_remote
from ckpt.terminal import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from ckpt.convert.conversion import Conversion
    from ckpt.convert.plan import Plan
    from ckpt.rectangles import Copy
    from ckpt.shards import TensorSpec

RESERVE_BYTES = 64 * 2**20  # for config.json, the index, receipts and the file system's own
# Four windows of output and one each to gather rows and for casts, of 16 MiB, with NumPy and the
# interpreter; what was measured, and how, stands in docs/performance.md.
WORKER_BYTES = 200 * 2**20
_OWN_STATE = Path("/proc/self/status")
_LEAST_SECONDS = 0.1  # no run takes less
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True)
class Shard:
    """One file of weights: its name, its bytes with its header, and how many tensors it holds."""

    name: str
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class Room:
    """Bytes that the output still takes on its disk, and those that are free at ``place``.

    ``kept_bytes`` are in files that an interrupted run has finished; ``freed_bytes`` in those
    of another conversion, which go away first. ``free`` is None where nobody counts them.
    ``barred`` says why nothing can be written at ``place``, as far as can be told beforehand.
    """

    place: Path
    needed: int
    free: int | None
    kept_bytes: int = 0
    freed_bytes: int = 0
    barred: str = ""

    @property
    def enough(self) -> bool:
        """Whether the output fits, as far as anybody knows."""
        return self.free is None or self.needed <= self.free + self.freed_bytes

    def check(self) -> None:
        """Raise OutputError where the output does not fit."""
        if not self.enough:
            raise OutputError(
                "not enough room on the disk",
                file=self.place,
                expected=f"{format_bytes(self.needed)} free",
                found=format_bytes((self.free or 0) + self.freed_bytes),
                hint="Make room, or choose another place; the same command goes on from here",
            )

    def as_dict(self) -> dict[str, Any]:
        """The room for machines."""
        return {
            "place": str(self.place),
            "needed_bytes": self.needed,
            "free_bytes": self.free,
            "finished_bytes": self.kept_bytes,
            "enough": self.enough,
            "cannot_write": self.barred or None,
        }


@dataclass(frozen=True)
class Needs:
    """What a conversion reads, compares and writes, and on what its time depends.

    Files that an interrupted run has finished are among the ``shards``, and not read or written.
    ``plan_bytes`` is the memory that the process took that made the plan, where it is known.
    """

    read_bytes: int
    compared_bytes: int
    written_bytes: int
    shards: tuple[Shard, ...]
    room: Room
    reads: ReadRate
    hashed_per_second: float
    workers: int = 1
    plan_bytes: int | None = None
    copied_bytes: int = 0

    @property
    def least_seconds(self) -> float:
        """The least time: that of reading, where reads have a rate, and of hashing.

        Reading, hashing and writing go on at the same time, so the slowest counts. Reads are as
        fast as one worker's for all of them.
        """
        if self.reads.lacks:
            return max(_LEAST_SECONDS, self._hashing())
        reading = self.read_bytes / self.reads.per_second
        compared = self.compared_bytes / self.reads.per_second
        return compared + max(_LEAST_SECONDS, reading, self._hashing())

    def _hashing(self) -> float:
        return self.written_bytes / self.hashed_per_second / self.workers

    def as_dict(self) -> dict[str, Any]:
        """Everything for machines."""
        return {
            "read_bytes": self.read_bytes,
            "compared_bytes": self.compared_bytes,
            "written_bytes": self.written_bytes,
            "copied_bytes": self.copied_bytes,
            "files": len(self.shards),
            "disk": self.room.as_dict(),
            "workers": self.workers,
            "memory_per_worker_bytes": WORKER_BYTES,
            "memory_of_plan_bytes": self.plan_bytes,
            "estimate": {
                "at_least_seconds": int(self.least_seconds * 10) / 10,
                "read_bytes_per_second": None if self.reads.lacks else int(self.reads.per_second),
                "read_places": self.reads.places,
                "not_measured": self.reads.lacks or None,
                "sha256_bytes_per_second": int(self.hashed_per_second),
                "text": self._time(),
            },
            "shards": [
                {"name": shard.name, "bytes": shard.nbytes, "tensors": shard.tensors}
                for shard in self.shards
            ],
        }

    def as_text(self) -> str:
        """A line for each need."""
        room = self.room
        free = "unknown" if room.free is None else format_bytes(room.free)
        kept = f", {format_bytes(room.kept_bytes)} are there already" if room.kept_bytes else ""
        still, reserve = format_bytes(room.needed - RESERVE_BYTES), RESERVE_BYTES // 2**20
        compared, worker = format_bytes(self.compared_bytes), format_bytes(WORKER_BYTES)
        weights = format_bytes(self.written_bytes - self.copied_bytes)
        copied = f", {format_bytes(self.copied_bytes)} of copied files" if self.copied_bytes else ""
        plan = f"; {format_bytes(self.plan_bytes)} for the plan" if self.plan_bytes else ""
        disk = (
            f"{format_bytes(room.needed)} needed ({still} to write, {reserve} MiB to stay free"
            f"{kept}), {free} free at {room.place}"
        )
        lines = [
            f"reads: {format_bytes(self.read_bytes)} of weights, {compared} of copies to compare",
            f"writes: {weights} in {plural(len(self.shards), 'file')} of weights{copied}",
            f"disk: {disk}" + ("" if room.enough else ": NOT ENOUGH"),
            f"memory: at most {worker} a worker, whatever the model's size{plan}",
            f"time: {self._time()}",
            *([f"output: cannot be written: {room.barred}"] if room.barred else []),
        ]
        return "\n".join(lines)

    def as_line(self) -> str:
        """The needs in one line, for a run that begins."""
        reads, worker = self.read_bytes + self.compared_bytes, format_bytes(WORKER_BYTES)
        return (
            f"needs: {format_bytes(reads)} to read, {format_bytes(self.room.needed)} of disk, "
            f"{worker} of memory for each of {plural(self.workers, 'worker')}; time: {self._time()}"
        )

    def _time(self) -> str:
        rate, places = _rate(self.reads.per_second), plural(self.reads.places, "place")
        reading = f"reading at {rate} as measured now at {places}, "
        lacking = f"reading ({self.reads.lacks}) and the output disk are not measured"
        return (
            f"at least {_duration(self.least_seconds)}: {'' if self.reads.lacks else reading}"
            f"hashing at {_rate(self.hashed_per_second)} a worker, "
            f"{plural(self.workers, 'worker')}; "
            f"{lacking if self.reads.lacks else 'the output disk is not measured'}"
        )


def needs_of(
    conversion: Conversion,
    output: Path,
    workers: int | Literal["auto"],
    own: Container[str] | None = None,
) -> Needs:
    """What carrying out ``conversion`` to ``output`` needs; reads a few MiB of the source.

    ``own`` names the files of a run that writes a part of them; such a part compares about as
    large a share of the copies.
    """
    from ckpt.convert.crew import choose_workers  # noqa: PLC0415 - planning needs no NumPy

    plan, files = conversion.plan, conversion.files
    if own is not None:
        files = tuple(file for file in files if file[0] in own)
    shards = tuple([_shard(name, specs) for name, specs in files])
    room, finished = _room(conversion, output, shards)
    lacking = [(name, specs) for name, specs in files if name not in finished]
    copies = _copies(plan, {spec.name for _, specs in lacking for spec in specs})
    compared = sum([check.first.nbytes + check.other.nbytes for check in plan.checks])
    nbytes = sum(shard.nbytes for shard in shards) - room.kept_bytes
    return Needs(
        read_bytes=sum([copy.rows * copy.width for copy in copies]),
        compared_bytes=compared * len(files) // max(1, len(conversion.files)),
        written_bytes=nbytes + _beside(conversion),
        shards=shards,
        room=room,
        reads=measure_reads(copies),
        hashed_per_second=hash_rate(),
        workers=choose_workers(None if workers == "auto" else workers, len(lacking), nbytes),
        plan_bytes=_own_peak(),
        copied_bytes=_beside(conversion),
    )


def _own_peak() -> int | None:
    """The most memory that this process has held, as Linux says it; None elsewhere."""
    try:
        text = _OWN_STATE.read_text(encoding="ascii")
        return 1024 * int(text.partition("VmHWM:")[2].split()[0])
    except (OSError, ValueError, LookupError):
        return None


def _room(
    conversion: Conversion, output: Path, shards: Sequence[Shard]
) -> tuple[Room, Mapping[str, int]]:
    """The room, and the files that a run of the same conversion has finished, with their bytes."""
    from ckpt.convert import staging  # noqa: PLC0415 - planning needs no NumPy

    wanted = sum(shard.nbytes for shard in shards) + _beside(conversion)
    if is_remote(output):
        return Room(output, wanted + RESERVE_BYTES, None), {}
    stage, place = staging.stage_path(output), _existing(output)
    there, names = _weights_in(stage), {shard.name for shard in shards}
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        free = None
    if not staging.read_state(stage, staging.Purpose(conversion.fingerprint, {}, {})):
        other = sum(there.values())
        return Room(place, wanted + RESERVE_BYTES, free, 0, other, _barred(output, place)), {}
    finished = {name: size for name, size in there.items() if name in names}
    kept = sum(finished.values())
    needed = max(0, wanted - kept) + RESERVE_BYTES
    return Room(place, needed, free, kept, barred=_barred(output, place)), finished


def _barred(output: Path, place: Path) -> str:
    """Why no directory can be made for ``output``, or nothing."""
    above = next((each for each in (output, *output.absolute().parents) if each.exists()), place)
    if not above.is_dir():
        return f"{above} is not a directory"
    return "" if os.access(place, os.W_OK) else f"no right to write in {place}, or it is read-only"


def _beside(conversion: Conversion) -> int:
    return sum(copied.stamp[0] for copied in conversion.copied)


def _weights_in(stage: Path) -> dict[str, int]:
    """Sizes of finished files of weights."""
    try:
        return {file.name: file.stat().st_size for file in stage.glob("*.safetensors")}
    except OSError:
        return {}


def _existing(output: Path) -> Path:
    """The nearest directory above ``output`` that is there."""
    place = next((place for place in output.absolute().parents if place.is_dir()), output.parent)
    plain = Path(os.path.normpath(place))  # which is another one where a link was climbed
    with suppress(OSError):
        return plain if plain.samefile(place) else place
    return place


def _copies(plan: Plan, names: Container[str]) -> list[Copy]:
    return [
        copy
        for target in plan.targets
        if target.spec.name in names
        for copies in (target.copies, *target.further)
        for copy in copies
    ]


def _shard(name: str, specs: Sequence[TensorSpec]) -> Shard:
    nbytes = len(header_bytes(specs)) + sum([spec.nbytes for spec in specs])
    return Shard(name, nbytes, len(specs))


def _rate(per_second: float) -> str:
    return f"{format_bytes(int(per_second))}/s"


def _duration(seconds: float) -> str:
    """A time for people, rounded down.

    >>> _duration(0.1), _duration(59.9), _duration(1320), _duration(9000), _duration(260000)
    ('0.1 s', '59 s', '22 min', '2.5 h', '3.0 days')
    """
    if seconds < 1:
        return f"{int(seconds * 10) / 10} s"
    if seconds < 2 * _MINUTE:
        return f"{int(seconds)} s"
    if seconds < 2 * _HOUR:
        return f"{int(seconds / _MINUTE)} min"
    if seconds < 2 * _DAY:
        return f"{int(seconds / _HOUR * 10) / 10} h"
    return f"{int(seconds / _DAY * 10) / 10} days"
