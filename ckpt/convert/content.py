"""The bytes of output files, tensor by tensor, and what was noticed in them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert import read
from ckpt.convert.maps import CastReport, Stepper
from ckpt.convert.nonfinite import NonfiniteCount
from ckpt.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt.convert.plan import Target
    from ckpt.convert.read import Files
    from ckpt.convert.write import Stream
    from ckpt.rectangles import Copy


class Content:
    """Fills a stream with tensors; counts what casts lose and values that are no numbers."""

    def __init__(
        self, files: Files, advance: Callable[[int], None], *, allow_nonfinite: bool
    ) -> None:
        """Bytes written are told to ``advance``."""
        self._files, self._advance, self._allow = files, advance, allow_nonfinite
        self._stored = np.empty(0, np.uint8)
        self.casts = CastReport()
        self.nonfinite: dict[str, int] = {}

    def put(self, target: Target, stream: Stream) -> None:
        """Put the target's bytes, after its steps, into the stream.

        Raises SourceError for NaN or infinite values unless they are allowed.
        """
        layers = [_in_order(copies) for copies in (target.copies, *target.further)]
        found = NonfiniteCount(target.stored)
        stepper = Stepper(target.stored, target.steps, target.spec.name, self.casts, found)
        item, stored = target.spec.dtype.itemsize, target.stored.itemsize
        limit = max(1, read.WINDOW_BYTES // stored // len(layers))
        done, total = 0, prod(target.spec.shape)
        while done < total:
            room = stream.room(item)
            count = min(total - done, len(room) // item, limit)
            out = room[: count * item]
            window = self._room(len(layers), count * stored) if target.steps else out[None]
            for row, copies in zip(window, layers, strict=True):
                read.fill_window(self._files, copies, row, done * stored)
            if target.steps:
                stepper.apply(window if target.further else window[0], out)
            else:
                found.add(window)
            done += count
            stream.put(len(out))
            self._advance(len(out))
        self._judge(target, found)

    def _room(self, layers: int, nbytes: int) -> np.ndarray:
        if len(self._stored) < layers * nbytes:
            self._stored = np.empty(max(layers * nbytes, read.WINDOW_BYTES), np.uint8)
        return self._stored[: layers * nbytes].reshape(layers, nbytes)

    def _judge(self, target: Target, found: NonfiniteCount) -> None:
        if found.count and not self._allow:
            raise _nonfinite(target, found)
        if found.count:
            self.nonfinite[target.spec.name] = found.count


def _in_order(copies: Sequence[Copy]) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.target)


def _nonfinite(target: Target, found: NonfiniteCount) -> SourceError:
    row, at = found.first
    end = at + target.stored.itemsize
    copies = (target.copies, *target.further)[row]
    return SourceError(
        "weights that are no numbers",
        file=next(copy.file for copy in copies if any(True for _ in read.clip(copy, at, end))),
        tensor=target.spec.name,
        expected="finite values",
        found=f"{found.count} that are NaN or infinite",
        hint="Training may have diverged: take an earlier --iteration, or convert them as they "
        "are with --allow-nonfinite",
    )
