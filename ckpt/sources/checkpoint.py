"""What every source gives: one training checkpoint, listed and not read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.sources.names import Skipped
    from ckpt.storage import Stamp
    from ckpt.tensors import DType, SourceTensor


@dataclass(frozen=True)
class Parallelism:
    """Parallel sizes of the training run; ``vpp`` is the model chunks a pipeline rank holds."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def as_dict(self) -> dict[str, int]:
        """The sizes by name, as the manifest stores them."""
        return {f"{name}_parallel": size for name, size in asdict(self).items()}


@dataclass(frozen=True)
class Checkpoint:
    """One iteration of one training run, in any format.

    ``args`` are the training arguments as plain values. ``tensors`` are under canonical
    names with global layer and expert numbers, in the order of the names' first mention.
    ``shapes`` gives each one's whole shape where it is known without the layout rules.
    ``missing_args`` says where to look for them when there are none.
    ``files`` are all files that a conversion may read; ``metadata_files`` those whose
    content (not only size and time) identifies the checkpoint. ``raw_names`` are the tensors'
    names as they are stored, where these differ from rank to rank none. ``stamps`` are those of
    its files before the first of them was read.
    """

    format: str
    directory: Path
    iteration: int | str | None
    args: Mapping[str, Any]
    parallelism: Parallelism
    tensors: tuple[SourceTensor, ...]
    shapes: Mapping[str, tuple[int, ...] | None]
    skipped: tuple[Skipped, ...]
    files: tuple[Path, ...]
    metadata_files: tuple[Path, ...]
    foreign_classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    raw_names: tuple[str, ...] = field(default=())
    missing_args: str = ""
    stamps: Mapping[str, Stamp] = field(default_factory=dict)

    def dtypes(self) -> dict[DType, int]:
        """How many tensors have each element type."""
        counts: dict[DType, int] = {}
        for tensor in self.tensors:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
        return counts


def parallelism_of(args: Mapping[str, Any]) -> Parallelism:
    """The sizes that the training arguments say; 1 where they say nothing."""

    def size(*names: str, default: int = 1) -> int:
        return count_in(args, *names) or default

    tensor = size("tensor_model_parallel_size", "model_parallel_size")
    pipeline = size("pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size")
    return Parallelism(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=size("virtual_pipeline_model_parallel_size"),
        expert=size("expert_model_parallel_size"),
        expert_tensor=size("expert_tensor_parallel_size", default=tensor),
    )


def count_in(args: Mapping[str, Any], *names: str) -> int:
    """The first of these training arguments that is set, 0 without one.

    Raises SourceError for what is no number.
    """
    name = next((name for name in names if args.get(name)), None)
    value = args[name] if name else 0
    if not isinstance(value, int) or value < 0:
        raise SourceError(
            "a training argument is no count", expected=f"{name}: a number", found=repr(value)[:40]
        )
    return value
