"""Run the original on a CPU: ``python -m ckpt.validate.megatron_worker request.json``.

A program of its own, because Megatron-Core on a CPU needs torch changed for the whole
process. A ``torch_dist`` checkpoint is loaded by Megatron-Core's own loader into one rank.
A ``torch`` checkpoint is run by as many ranks as wrote it, each with its own file, so that
no merging of ours is part of the reference.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

warnings.filterwarnings("ignore")
from ckpt.validate import megatron_cpu  # isort: skip - before anything of Megatron

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as groups
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors.torch import load_file, save_file

from ckpt.sources import open_source
from ckpt.sources.flatten import flatten
from ckpt.sources.torch_archive import read_archive
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.tensors import DType
from ckpt.validate import megatron_model as model
from ckpt.validate import megatron_te

_SINGLE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
}


def main() -> None:
    """Read the request, run the ranks, leave the answer where the request says."""
    torch.set_num_threads(1)  # a thread pool does not survive the fork
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    checkpoint = open_source(Path(request["checkpoint"]))
    args = {
        name: getattr(torch, value.torch_name) if isinstance(value, DType) else value
        for name, value in checkpoint.args.items()
    }
    args["padded_vocab_size"] = request["padded_vocab_size"]
    if checkpoint.format == "torch_dist":
        args |= _SINGLE
        world = 1
    else:
        sizes = checkpoint.parallelism
        args["expert_tensor_parallel_size"] = sizes.expert_tensor
        dense, expert = sizes.tensor, sizes.expert * sizes.expert_tensor
        world = sizes.pipeline * math.lcm(dense, expert)
    stages = args.get("pipeline_model_parallel_size") or 1
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.start_processes(
            _rank,
            (request, args, world, checkpoint.format, str(Path(place) / "rendezvous")),
            nprocs=world,
            start_method="fork",
        )
    answer = {}
    for stage in range(stages):
        answer |= load_file(_part(request, stage))
    save_file(answer, request["output"])


def _part(request, stage):
    return f"{request['output']}.{stage}"


def _rank(rank, request, args, world, kind, rendezvous):
    te = request["te"]
    warnings.filterwarnings("ignore")
    megatron_cpu.install()
    if te:
        megatron_te.install()
    megatron_te.install_missing(mla=bool(args.get("multi_latent_attention")))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=30),
    )
    groups.initialize_model_parallel(
        args.get("tensor_model_parallel_size") or 1,
        args.get("pipeline_model_parallel_size") or 1,
        virtual_pipeline_model_parallel_size=args.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=args.get("expert_model_parallel_size") or 1,
        expert_tensor_parallel_size=args.get("expert_tensor_parallel_size"),
    )
    model_parallel_cuda_manual_seed(1234)
    chunks = model.build(args, te=te)
    directory = Path(request["checkpoint"])
    if kind == "torch_dist":
        _load_sharded(chunks, directory, single=request["single"])
    else:
        _load_rank(chunks, directory, args)
    ids = load_file(request["inputs"])["input_ids"]
    logits, hidden = model.forward(chunks, args, ids)
    if groups.get_tensor_model_parallel_rank() == groups.get_data_parallel_rank() == 0:
        tensors = {f"hidden_states.{layer}": state for layer, state in hidden.items()}
        if logits is not None:
            tensors |= {"input_ids": ids, "logits": logits}
        save_file(tensors, _part(request, groups.get_pipeline_model_parallel_rank()))
    dist.barrier()
    dist.destroy_process_group()


def _load_sharded(chunks, directory, *, single):
    metadata = {
        "singleton_local_shards": single,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True),
    }
    wanted = chunks[0].sharded_state_dict(metadata=metadata)
    wanted = {name: item for name, item in wanted.items() if "_extra_state" not in name}
    state = dist_checkpointing.load({"model": wanted}, str(directory))
    _load_strictly(chunks[0], state["model"])


def _load_rank(chunks, directory, args):
    name = f"mp_rank_{groups.get_tensor_model_parallel_rank():02d}"
    if (args.get("pipeline_model_parallel_size") or 1) > 1:
        name += f"_{groups.get_pipeline_model_parallel_rank():03d}"
    if (args.get("expert_model_parallel_size") or 1) > 1:
        name += f"_{groups.get_expert_model_parallel_rank():03d}"
    archive = read_archive(directory / name / "model_optim_rng.pt", Reader())
    several = len(chunks) > 1
    for number, chunk in enumerate(chunks):
        state = {}
        for key, value in flatten(archive.root[f"model{number}" if several else "model"]):
            if isinstance(value, TensorRef) and "_extra_state" not in key:
                state[key] = _read(archive.view(value, name=key))
        _load_strictly(chunk, state)


def _read(view):
    count = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    size = count * view.dtype.itemsize
    content = np.fromfile(view.file, np.uint8, count=size, offset=view.offset)
    flat = torch.from_numpy(content).view(getattr(torch, view.dtype.torch_name))
    return flat.as_strided(view.shape, view.strides).clone()


def _load_strictly(chunk, state):
    report = chunk.load_state_dict(state, strict=False)
    missing = [key for key in report.missing_keys if "_extra_state" not in key]
    missing = [key for key in missing if "local_tokens_per_expert" not in key]
    if missing or report.unexpected_keys:
        message = f"missing {missing[:5]}, unexpected {report.unexpected_keys[:5]}"
        raise RuntimeError(message)


if __name__ == "__main__":
    main()
