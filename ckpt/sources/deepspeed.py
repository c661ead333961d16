"""Megatron-DeepSpeed and GPT-NeoX: ``global_step*`` directories that hold the weights whole.

``layer_LL-model_TT-model_states.pt`` holds one pipeline layer of tensor rank TT under names
without the layer. ``mp_rank_MM_model_states.pt`` holds the arguments and, without pipeline
parallelism, the whole rank's model. Optimizer files are never opened: ZeRO 1 and 2 split
only what lies in them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.assemble import assemble, check_ranks, read_run, views_of
from ckpt.sources.checkpoint import Checkpoint, Parallelism
from ckpt.sources.flatten import flatten
from ckpt.sources.ranked import OneSave
from ckpt.sources.torch_archive import TorchArchive, read_archive
from ckpt.sources.unpickle import Reader
from ckpt.storage import ahead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt.parts import Held
    from ckpt.sources.locate import Located

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a ``global_step*`` directory.

    Raises SourceError for layers or ranks that are missing, for weights that lie elsewhere,
    and for models that no family can be.
    """
    del spans
    directory, reader = located.directory, Reader()
    states = numbered(directory, _RANK_FILE)
    if not states:
        raise SourceError("mp_rank_*_model_states.pt is missing", file=directory)
    first = read_archive(states[min(states)], reader)
    run = read_run(located, first, reader)
    _check_stage(first)
    layers = numbered(directory, _LAYER_FILE)
    if layers:
        archives = _open_layers(layers, reader)
        tp = max(rank for _, rank in layers) + 1
        stored = _from_layers(archives)
    else:
        archives = _open_ranks(states, reader)
        tp = len(archives)
        stored = _from_ranks(archives)
    check_ranks(run, stored, tp)
    return assemble(
        run,
        stored,
        files=[archive.file for archive in archives.values()],
        parallelism=Parallelism(tensor=tp, pipeline=max(1, len(states) // tp), expert_tensor=tp),
        skipped=_skipped(archives),
    )


def numbered(directory: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Files whose name fits, by the numbers in it."""
    found = {}
    for path in sorted(directory.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            found[tuple(int(part) for part in match.groups())] = path
    return found


def _check_stage(archive: TorchArchive) -> None:
    config = archive.root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("stage") == 3:  # noqa: PLR2004 - ZeRO's own number
        raise SourceError(
            "ZeRO stage 3 keeps the weights in zero_pp_rank_* files, which are not here",
            file=archive.file,
            hint="Copy them as well",
        )


def _open_layers(
    files: Mapping[tuple[int, ...], Path], reader: Reader
) -> dict[tuple[int, ...], TorchArchive]:
    ranks = range(max(rank for _, rank in files) + 1)
    numbers = sorted({number for number, _ in files})
    missing = [(n, r) for n in numbers for r in ranks if (n, r) not in files]
    if missing:
        listed = ", ".join(f"layer_{n:02d}-model_{r:02d}" for n, r in missing[:8])
        raise SourceError(f"files are missing: {listed}", file=next(iter(files.values())).parent)
    archives = _archives(files, sorted(files), reader)
    for number in numbers:  # a tied model's first and last layer may well be alike
        save = OneSave()
        for rank in ranks:
            save.add((rank,), archives[number, rank])
    return archives


def _archives(
    files: Mapping[tuple[int, ...], Path], keys: Sequence[tuple[int, ...]], reader: Reader
) -> dict[tuple[int, ...], TorchArchive]:
    opened = ahead(lambda key: read_archive(files[key], reader), keys, files[keys[0]])
    return dict(zip(keys, opened, strict=True))


def _from_layers(
    archives: Mapping[tuple[int, ...], TorchArchive],
) -> dict[str, dict[int, Held]]:
    stored: dict[str, dict[int, Held]] = {}
    for (number, rank), archive in archives.items():
        for name, held in views_of(archive, _state(archive, archive.root)):
            stored.setdefault(f"{number}.{name}", {})[rank] = held
    return stored


def _open_ranks(
    files: Mapping[tuple[int, ...], Path], reader: Reader
) -> dict[tuple[int, ...], TorchArchive]:
    ranks = range(max(rank for (rank,) in files) + 1)
    missing = [rank for rank in ranks if (rank,) not in files]
    if missing:
        listed = ", ".join(f"mp_rank_{rank:02d}_model_states.pt" for rank in missing)
        raise SourceError(f"files are missing: {listed}", file=next(iter(files.values())).parent)
    archives = _archives(files, [(rank,) for rank in ranks], reader)
    save = OneSave()
    for numbers, archive in archives.items():
        save.add(numbers, archive)
    return archives


def _from_ranks(
    archives: Mapping[tuple[int, ...], TorchArchive],
) -> dict[str, dict[int, Held]]:
    """Runs without pipeline: every rank file holds its part of the whole model."""
    stored: dict[str, dict[int, Held]] = {}
    for (rank,), archive in archives.items():
        module = archive.root.get("module") if isinstance(archive.root, dict) else None
        for name, held in views_of(archive, _state(archive, module)):
            stored.setdefault(name, {})[rank] = held
    return stored


def _state(archive: TorchArchive, state: object) -> Mapping[str, object]:
    if not isinstance(state, dict):
        raise SourceError(
            "holds no weights, and no layer_*-model_*-model_states.pt lie beside it",
            file=archive.file,
        )
    return state


def _skipped(archives: Mapping[tuple[int, ...], TorchArchive]) -> list[tuple[str, str]]:
    """Entries of the first rank that are no weights, and why."""
    found = []
    for (*_, rank), archive in archives.items():
        state = archive.root.get("module") if "module" in archive.root else archive.root
        for name, _ in flatten(state) if rank == 0 and isinstance(state, dict) else ():
            reason = names.skip_reason(name)
            if reason:
                found.append((name, reason))
    return found
