"""What a conversion needs: bytes to read and to write, room, memory and time, said beforehand."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt.convert.rates import ReadRate, hash_rate, measure_reads
from ckpt.errors import OutputError
from ckpt.shards import header_bytes
from ckpt.storage import is_remote
from ckpt.terminal import format_bytes

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
    """

    place: Path
    needed: int
    free: int | None
    kept_bytes: int = 0
    freed_bytes: int = 0

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

    @property
    def seconds(self) -> float | None:
        """The time that reading and hashing take; None where reads have no rate.

        Reading, hashing and writing go on at the same time, so the slowest counts. Reads are as
        fast as one worker's for all of them.
        """
        if self.reads.lacks:
            return None
        reading = self.read_bytes / self.reads.per_second
        compared = self.compared_bytes / self.reads.per_second
        return compared + max(reading, self._hashing())

    def _hashing(self) -> float:
        return self.written_bytes / self.hashed_per_second / self.workers

    def as_dict(self) -> dict[str, Any]:
        """Everything for machines."""
        seconds = self.seconds
        return {
            "read_bytes": self.read_bytes,
            "compared_bytes": self.compared_bytes,
            "written_bytes": self.written_bytes,
            "files": len(self.shards),
            "disk": self.room.as_dict(),
            "workers": self.workers,
            "memory_per_worker_bytes": WORKER_BYTES,
            "memory_of_plan_bytes": self.plan_bytes,
            "estimate": {
                "seconds": None if seconds is None else round(seconds, 1),
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
        """A line for each need, then the list of files."""
        room = self.room
        free = "unknown" if room.free is None else format_bytes(room.free)
        kept = f", {format_bytes(room.kept_bytes)} are there" if room.kept_bytes else ""
        compared, worker = format_bytes(self.compared_bytes), format_bytes(WORKER_BYTES)
        plan = f"; {format_bytes(self.plan_bytes)} for the plan" if self.plan_bytes else ""
        lines = [
            f"reads: {format_bytes(self.read_bytes)} of weights, {compared} of copies to compare",
            f"writes: {format_bytes(self.written_bytes)} in {len(self.shards)} file(s) of weights",
            f"disk: {format_bytes(room.needed)} needed{kept}, {free} free at {room.place}"
            + ("" if room.enough else ": NOT ENOUGH"),
            f"memory: at most {worker} a worker, whatever the model's size{plan}",
            f"time: {self._time()}",
        ]
        for shard in self.shards:
            size = format_bytes(shard.nbytes)
            lines.append(f"file: {shard.name}  {size}, {shard.tensors} tensors")
        return "\n".join(lines)

    def as_line(self) -> str:
        """The needs in one line, for a run that begins."""
        reads, worker = self.read_bytes + self.compared_bytes, format_bytes(WORKER_BYTES)
        return (
            f"needs: {format_bytes(reads)} to read, {format_bytes(self.room.needed)} of disk, "
            f"{worker} of memory for each of {self.workers} worker(s); time: {self._time()}"
        )

    def _time(self) -> str:
        many = f", {self.workers} workers" if self.workers > 1 else ""
        hashed = f"SHA-256 {_rate(self.hashed_per_second)} a worker{many}"
        seconds = self.seconds
        if seconds is None:
            floor = _duration(self._hashing())
            return f"not estimated: {self.reads.lacks}; at least {floor} at {hashed}"
        pace = (self.read_bytes + self.compared_bytes) / max(seconds, 1e-9)
        return (
            f"about {_duration(seconds)} at {_rate(pace)} (read rate of "
            f"{_rate(self.reads.per_second)} measured now at {self.reads.places} places, {hashed}; "
            "the output disk is not measured)"
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
        return Room(place, wanted + RESERVE_BYTES, free, freed_bytes=sum(there.values())), {}
    finished = {name: size for name, size in there.items() if name in names}
    kept = sum(finished.values())
    return Room(place, max(0, wanted - kept) + RESERVE_BYTES, free, kept), finished


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
    return next((place for place in output.absolute().parents if place.is_dir()), output.parent)


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
    """A time for people.

    >>> _duration(0.4), _duration(59), _duration(1320), _duration(9000), _duration(260000)
    ('1 s', '59 s', '22 min', '2.5 h', '3.0 days')
    """
    if seconds < 2 * _MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / _DAY:.1f} days"
