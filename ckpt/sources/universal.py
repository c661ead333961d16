"""DeepSpeed's universal checkpoints: one directory with ``fp32.pt`` for each parameter.

``ds_to_universal.py`` joins the tensor-parallel ranks by patterns that the training code
gave it (deepspeed/checkpoint/ds_to_universal.py, merge_tp_slices). What it only laid end to
end, along ``cat_dim``, is taken apart again here, and the layout rules join it: a pattern
that was missing then, for a gated MLP or a norm, does no harm. What it joined with knowledge
(gate and up, vocabulary without padding, copies, means) is taken as it is.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.parts import Held
from ckpt.sources import names
from ckpt.sources.assemble import assemble, read_run
from ckpt.sources.checkpoint import Checkpoint, parallelism_of
from ckpt.sources.deepspeed import numbered
from ckpt.sources.torch_archive import TorchArchive, read_archive
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.storage import ahead

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.sources.locate import Located
    from ckpt.tensors import View

_STATE_FILES = re.compile(r"(?:zero_pp_rank_(?:\d+)_)?mp_rank_(\d+)_model_states\.pt")
_FILE = "fp32.pt"
_KNOWN = {"param", "cat_dim", "vocab_tensor", "param_n_sub_params"}
_GATE_AND_UP = 2


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a universal directory; no tensor is read.

    Raises SourceError for parameters whose joining is not known here.
    """
    del spans
    directory, reader = located.directory, Reader()
    states = numbered(directory, _STATE_FILES)
    state = read_archive(states[min(states)], reader)
    run = read_run(located, state, reader)
    sizes = parallelism_of(run.args)
    shapes = _flat_shapes(state)
    stored: dict[str, dict[int, Held]] = {}
    files, skipped = [], []
    folders = []
    for folder in sorted(path for path in (directory / "zero").iterdir() if path.is_dir()):
        if reason := names.skip_reason(folder.name):
            skipped.append((folder.name, reason))
        else:
            folders.append(folder)
    opened = ahead(lambda folder: _open(folder, reader), folders, directory)
    for folder, archive in zip(folders, opened, strict=True):
        stored[folder.name] = _by_rank(archive, folder.name, sizes.tensor, shapes)
        files.append(archive.file)
    notes = "weights are the optimizer's float32 values; --dtype gives them another type"
    return assemble(
        run, stored, files=[*files, state.file], parallelism=sizes, skipped=skipped, notes=(notes,)
    )


def _open(folder: Path, reader: Reader) -> TorchArchive:
    if not (folder / _FILE).is_file():
        raise SourceError(f"{_FILE} is missing", file=folder)
    return read_archive(folder / _FILE, reader)


def _flat_shapes(archive: TorchArchive) -> dict[str, tuple[int, ...]]:
    """Shapes by name; parameters of ZeRO 3 are stored flat."""
    groups = archive.root.get("param_shapes") or {}
    found: dict[str, tuple[int, ...]] = {}
    for group in groups if isinstance(groups, list) else [groups]:
        found |= {name: shape for name, shape in group.items() if isinstance(shape, tuple)}
    return found


def _by_rank(
    archive: TorchArchive, name: str, tp: int, shapes: dict[str, tuple[int, ...]]
) -> dict[int, Held]:
    """What each rank held, or the whole as rank 0 alone."""
    root: Any = archive.root
    entry = root if isinstance(root, dict) else {"param": root}
    unknown = set(entry) - _KNOWN
    value = entry.get("param")
    if unknown or not isinstance(value, TensorRef):
        raise SourceError(
            "a parameter that was joined in an unknown way",
            file=archive.file,
            tensor=name,
            expected=f"only {', '.join(sorted(_KNOWN))}",
            found=", ".join(sorted(map(str, entry))) or type(root).__name__,
            hint="Convert the checkpoint from which the universal one was made",
        )
    view = archive.view(value, name=name)
    if not isinstance(root, dict):
        view = _shaped(archive, view, name, shapes)
    joined_by_parts = entry.get("param_n_sub_params") == _GATE_AND_UP or "vocab_tensor" in entry
    if tp == 1 or "cat_dim" not in entry or joined_by_parts:
        return {0: Held.whole(view)}
    return _take_apart(archive, view, name, entry["cat_dim"], tp)


def _shaped(
    archive: TorchArchive, view: View, name: str, shapes: dict[str, tuple[int, ...]]
) -> View:
    shape = shapes.get(name)
    if shape is None or prod(shape) != prod(view.shape) or not view.is_contiguous:
        raise SourceError(
            "a flat parameter that fits no shape in param_shapes",
            file=archive.file,
            tensor=name,
            expected=shape,
            found=f"{prod(view.shape)} elements",
        )
    return view.reshape(shape)


def _take_apart(
    archive: TorchArchive, view: View, name: str, dim: object, tp: int
) -> dict[int, Held]:
    if not isinstance(dim, int) or not 0 <= dim < len(view.shape) or view.shape[dim] % tp:
        raise SourceError(
            f"cannot be the ranks' parts along dimension {dim}",
            file=archive.file,
            tensor=name,
            expected=f"a multiple of {tp} ranks",
            found=list(view.shape),
        )
    length = view.shape[dim] // tp
    return {rank: Held.whole(view.narrow(dim, rank * length, length)) for rank in range(tp)}
