"""What finished stages read, with which options, and wrote: ``ckpt-manifest.json``.

The file lies in the model's directory and holds one section for each stage that ended
well. It is the last file that a stage writes, by an atomic rename; a directory without it
is not a finished model.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ckpt import __version__
from ckpt.errors import OutputError
from ckpt.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST_NAME = "ckpt-manifest.json"
SCHEMA = 1
TEMPORARY_SUFFIX = ".tmp"
JsonDict = dict[str, Any]


def read_manifest(directory: Path) -> JsonDict | None:
    """The manifest of a directory, or None if it has none; raises OutputError if damaged."""
    file = directory / MANIFEST_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(f"cannot read the manifest: {error}", file=file) from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), dict):
        raise OutputError("not a manifest of this tool", file=file)
    if content.get("schema") != SCHEMA:
        raise OutputError(
            "manifest of another version", file=file, expected=SCHEMA, found=content.get("schema")
        )
    return content


def read_stage(directory: Path, stage: str) -> JsonDict | None:
    """The section that ``stage`` left in the directory's manifest, or None."""
    content = read_manifest(directory)
    section = (content or {}).get("stages", {}).get(stage)
    return section if isinstance(section, dict) else None


def write_stage(directory: Path, stage: str, section: Mapping[str, Any]) -> None:
    """Add or replace the section of ``stage``; earlier stages' sections stay."""
    content = read_manifest(directory) or {"schema": SCHEMA, "stages": {}}
    content["tool"] = tool_versions()
    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content["stages"][stage] = {"finished": finished, **section}
    write_json(directory / MANIFEST_NAME, content)


def refuse_existing(directory: Path, *, ours: bool, overwrite: bool) -> None:
    """Raise OutputError for a finished directory unless it is ``ours`` and may be replaced."""
    if not overwrite:
        raise OutputError(
            "the output exists", file=directory, hint="Choose another one, or give --overwrite"
        )
    if not ours:
        raise OutputError(
            "the output exists and was not written by ckpt, so --overwrite does not touch it",
            file=directory,
            hint="Remove it yourself, or choose another one",
        )


def write_json(file: Path, content: object) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never a part."""
    text = json.dumps(content, indent=2, sort_keys=False, default=str) + "\n"
    write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file by way of a flushed temporary one and an atomic rename; an object at once."""
    if is_remote(file):
        file.write_bytes(content)
        return
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def fingerprint(*values: object) -> str:
    """A digest of plain values, equal exactly if they are; 32 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tool_versions() -> dict[str, str]:
    """Versions of this tool and of the libraries it works with, those that are installed."""
    from importlib import metadata  # noqa: PLC0415 - a slow import, and only for a manifest

    versions = {"ckpt": __version__, "python": platform.python_version()}
    for name in ("torch", "safetensors", "transformers", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
