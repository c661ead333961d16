"""An output that grows in an object store, where nothing can be renamed.

Its files are put under their own names at once. That they are not finished is said by what lies
in ``OUT/.ckpt-partial/``: the state of the run, and a receipt for each finished file of weights.
config.json and then the manifest are written last; without the one it loads as nothing, without
the other it is no finished output. An older output loses config.json first and its manifest last,
so that whoever is killed in between can go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.convert.units import PARTIAL, STATE_NAME, own_place
from ckpt.errors import OutputError
from ckpt.manifest import MANIFEST_NAME, read_manifest, read_stage, refuse_existing
from ckpt.shards import INDEX_NAME
from ckpt.storage import as_object, files_below, refresh
from ckpt.storage.uploads import Upload, abort_uploads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt.convert.share import Share

_CONFIG_NAME = "config.json"


class ObjectFile:
    """An output file as an object: sent in parts, there when it is whole."""

    def __init__(self, file: Path, nbytes: int) -> None:
        """Begin an upload of about so many bytes."""
        place = as_object(file)
        self._upload = Upload(place.store, place.key, nbytes)
        self._last, self._at = b"", 0  # what may have to be cut at the end

    def write(self, content: memoryview, at: int) -> None:
        """Send what came before, and keep ``content``."""
        self._upload.write(self._last)
        self._last, self._at = bytes(content), at

    def commit(self, size: int) -> None:
        """Send the rest up to ``size``; then the object appears."""
        self._upload.write(self._last[: size - self._at])
        self._upload.commit()

    def abort(self) -> None:
        """Leave nothing of it, and no parts that nobody sees."""
        self._last = b""
        self._upload.abort()


def check_output(output: Path, *, overwrite: bool) -> None:
    """As for a directory: OutputError when something is in the way that must not be replaced."""
    refresh(output)
    if output.is_file():
        raise OutputError("the output is an object, not a directory", file=output)
    if not output.is_dir() or _unfinished(output):
        return
    refuse_existing(output, ours=(output / MANIFEST_NAME).is_file(), overwrite=overwrite)


def _unfinished(output: Path) -> bool:
    return (output / PARTIAL / STATE_NAME).is_file()


def check_replaceable(output: Path, share: Share) -> None:
    """Raise OutputError where parts would replace a finished output, each without the others."""
    if share.partial and (output / MANIFEST_NAME).is_file():
        raise OutputError(
            "parts cannot replace a finished output in a store",
            file=output,
            hint="Remove it first, or choose another one",
        )


def clear_unfinished(output: Path) -> None:
    """Remove what another conversion left unfinished; its state stays until it is replaced."""
    for file in [output / _CONFIG_NAME, output / INDEX_NAME, *output.glob("model*.safetensors")]:
        file.unlink()
    _clear_receipts(output)


def clear_finished(output: Path) -> None:
    """Remove an older output: what makes it load first, what says that it is one last."""
    content = read_manifest(output) if (output / MANIFEST_NAME).is_file() else None
    if content is None:
        return
    (output / _CONFIG_NAME).unlink()
    for entry in content["stages"].get("convert", {}).get("outputs", []):
        (output / str(entry["name"])).unlink()
    (output / MANIFEST_NAME).unlink()
    refresh(output)


def finished_section(output: Path, fingerprint: str) -> dict[str, Any] | None:
    """The manifest's section of an output that lacks nothing but the removal of receipts.

    Sizes are compared; the bytes were when they were sent.
    """
    refresh(output)
    if not output.is_dir() or not _unfinished(output):
        return None
    try:
        section = read_stage(output, "convert")
    except OutputError:
        return None
    if section is None or section.get("fingerprint") != fingerprint:
        return None
    for entry in section["outputs"]:
        file = output / entry["name"]
        if not file.is_file() or file.stat().st_size != entry["size"]:
            return None
    return section


def clear_own(output: Path) -> None:
    """Remove what only an unfinished output has, its state last."""
    _clear_receipts(output)
    (own_place(output) / STATE_NAME).unlink()


def _clear_receipts(output: Path) -> None:
    for file in [file for file in files_below(own_place(output)) if file.name != STATE_NAME]:
        file.unlink()


def abort_leftovers(output: Path, names: Sequence[str] | None) -> None:
    """End uploads that killed processes left of these files, or of any below the output."""
    place = as_object(output)
    for start in [""] if names is None else names:
        abort_uploads(place.store, f"{place.key}/{start}")
