"""The conversion that most scripts do: load everything, concatenate, save once.

    python benchmarks/bench_naive.py SOURCE OUTPUT [--bf16]

Rank files are read with ``torch.load``, ``torch_dist`` with PyTorch's own distributed
checkpoint. It needs the memory of the whole model, more than once.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from synthetic import to_hf
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    Found = Iterator[tuple[str, torch.Tensor]]  # whole weights by their global names


def load_legacy(source: Path) -> tuple[Any, Found]:
    """The arguments and the whole weights of rank files."""
    files = sorted(source.glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    loaded = {file.parent.name: torch.load(file, weights_only=False) for file in files}
    args = next(iter(loaded.values()))["args"]
    return args, _merge(args, {name: state["model"] for name, state in loaded.items()})


def _merge(args: Any, ranks: dict[str, dict[str, torch.Tensor]]) -> Found:  # noqa: ANN401 - stored
    """Join each stage's weights over its tensor ranks; an expert's over its own."""
    pp, ep = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    for stage, expert_rank in itertools.product(range(pp), range(ep)):
        of_stage = {n: model for n, model in ranks.items() if n[10:14] == f"_{stage:03d}"}
        of_experts = [m for n, m in of_stage.items() if n[14:] in ("", f"_{expert_rank:03d}")]
        # Every expert rank has all dense weights, unless each has the parts of a tensor rank.
        full = args.expert_tensor_parallel_size == args.tensor_model_parallel_size
        of_dense = of_experts if full else list(of_stage.values())
        layer, expert = args.num_layers // pp * stage, (args.num_experts or 0) // ep * expert_rank
        for name in of_experts[0]:
            is_expert = ".mlp.experts." in name
            if "_extra_state" not in name and (is_expert or expert_rank == 0):
                shards = of_experts if is_expert else of_dense
                yield _global(name, layer, expert), _join(name, [shard[name] for shard in shards])


def _global(name: str, first_layer: int, first_expert: int) -> str:
    def number(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) + first_layer}."

    name = re.sub(r"^(decoder\.layers\.)(\d+)\.", number, name)
    expert = re.fullmatch(r"(.*\.mlp\.experts\.)(linear_fc\d\.weight)(\d+)", name)
    return f"{expert[1]}{int(expert[3]) + first_expert}.{expert[2]}" if expert else name


def _join(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 or "norm" in name or ".router." in name:
        return parts[0]
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[side] for side in (0, 1) for half in halves])
    columns = "linear_proj." in name or "linear_fc2." in name
    return torch.cat(parts, dim=1 if columns else 0)


def load_dist(source: Path) -> tuple[Any, Found]:
    """The arguments and the whole weights of a ``torch_dist`` checkpoint."""
    (directory,) = source.glob("iter_*")
    args = torch.load(directory / "common.pt", weights_only=False)["args"]
    reader = FileSystemReader(directory)
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs in one process
        load(state, storage_reader=reader, no_dist=True)
    return args, _unstack(state)


def _unstack(state: dict[str, torch.Tensor]) -> Found:
    for name, value in state.items():
        inside = name.removeprefix("decoder.layers.")
        if inside == name:
            yield name, value
            continue
        expert = inside.removeprefix("mlp.experts.experts.")
        for layer, weight in enumerate(value):
            at = f"decoder.layers.{layer}."
            if expert == inside:
                yield at + inside, weight
                continue
            for number, one in enumerate(weight):
                yield f"{at}mlp.experts.{number}.{expert}", one


def convert(source: Path, output: Path, *, bf16: bool) -> None:
    """Load, merge, and save in one file."""
    legacy = any(source.glob("iter_*/mp_rank_*"))
    args, found = load_legacy(source) if legacy else load_dist(source)
    merged = {}
    for key, weight in found:
        for name, value in to_hf(key, weight, args):
            merged[name] = value.to(torch.bfloat16) if bf16 else value.contiguous()
    output.mkdir()
    save_file(merged, output / "model.safetensors")


def main() -> None:
    """Convert, or say that the memory does not suffice (exit code 3)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--bf16", action="store_true", help="cast every tensor")
    options = parser.parse_args()
    try:
        convert(options.source, options.output, bf16=options.bf16)
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            print(f"out of memory: {error}", file=sys.stderr)
            sys.exit(3)
        raise


if __name__ == "__main__":
    main()
