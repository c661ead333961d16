"""Write the checkpoints that a JSON file lists: ``python megatron_worker.py layouts.json``.

A program of its own, because megatron-core on a CPU needs torch changed for the whole process
(``ckpt.validate.megatron_cpu``). Megatron is imported once; then the ranks of each checkpoint
are forked.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
from ckpt.validate import megatron_cpu  # isort: skip - before anything of Megatron

import megatron_model as model
import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron_families import BASE, FAMILIES
from safetensors.torch import save_file
from torch import multiprocessing

from ckpt.validate import megatron_te

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OLD_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}


def make_args(layout):
    values = {**BASE, **FAMILIES[layout.family], **layout.overrides}
    if layout.vocab:
        values["vocab_size"] = layout.vocab
    multiple = values["make_vocab_size_divisible_by"]
    if values["moe_grouped_gemm"] and not layout.te:
        values["moe_use_legacy_grouped_gemm"] = True  # the local spec has no other
    return argparse.Namespace(
        **values,
        **model.parallel_fields(layout),
        padded_vocab_size=model.padded_vocab_size(values["vocab_size"], multiple, layout.tp),
        transformer_impl="transformer_engine" if layout.te else "local",
        params_dtype=DTYPES[layout.dtype],
        bf16=layout.dtype == "bf16",
        fp16=layout.dtype == "fp16",
        ckpt_format=layout.format,
        use_dist_ckpt=layout.format != "torch",
        use_distributed_optimizer=layout.dist_opt,
        no_save_optim=not layout.train,
        iteration=layout.train or 1,
        consumed_train_samples=4 * layout.train,
        tokenizer_type="NullTokenizer",
        use_mcore_models=True,
        micro_batch_size=1,
        global_batch_size=4,
        lr=0.01,
        optimizer="adam",
        exit_signal=signal.SIGTERM,
    )


def start_rank(rank, args, rendezvous, *, te, extra="uint8"):
    """Join the process group at the file ``rendezvous`` and set Megatron up for ``args``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    megatron_cpu.install()
    if te:
        megatron_te.install(extra)
    megatron_te.install_missing(mla=args.multi_latent_attention)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=args.world_size,
        timeout=timedelta(minutes=5),
    )
    groups.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(1234)


def write_rank(rank, layout, args, rendezvous):
    """One rank's part: fill or train the model, write its shards, record its logits."""
    start_rank(rank, args, rendezvous, te=layout.te, extra=layout.extra)
    chunks = model.build(args, args.params_dtype)
    model.fill(chunks)
    trainer = _trained(chunks, args, layout.train) if layout.train else None
    ids = torch.randint(
        0, args.vocab_size, tuple(layout.positions), generator=torch.Generator().manual_seed(5)
    )
    logits, mtp_logits = model.forward(chunks, args, ids)
    model.save(
        chunks,
        _stored(args, layout),
        layout.directory,
        trainer=trainer,
        single=layout.single,
        sharding_type=layout.optim_sharding,
    )
    exact = logits
    if args.params_dtype != torch.float32:
        exact = model.exact_logits(chunks, args, ids)
    if logits is not None and groups.get_tensor_model_parallel_rank() == 0:
        record = {"input_ids": ids, "logits": logits, "logits_fp32": exact.clone()}
        if mtp_logits is not None:
            record["mtp_logits"] = mtp_logits
        if groups.get_data_parallel_rank() == 0:
            save_file(record, Path(layout.directory) / "answers.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def _stored(args, layout):
    if not layout.old_args:
        return args
    values = {OLD_NAMES.get(name, name): value for name, value in vars(args).items()}
    return argparse.Namespace(**values)


def _trained(chunks, args, steps):
    trainer = model.Trainer(chunks, args, lr=args.lr)
    generator = torch.Generator().manual_seed(77)
    for _ in range(steps):
        trainer.step(torch.randint(0, args.vocab_size, (4, 32), generator=generator))
    for module in [module for chunk in chunks for module in chunk.modules()]:
        if getattr(module, "local_tokens_per_expert", None) is not None:
            module.local_tokens_per_expert.zero_()
    return trainer


def fork_ranks(rank_function, args, *values):
    """Run ``rank_function(rank, *values, args, rendezvous)`` on as many ranks as args say."""
    with tempfile.TemporaryDirectory() as place:
        multiprocessing.start_processes(  # type: ignore[attr-defined]
            rank_function,
            (*values, args, str(Path(place) / "rendezvous")),
            nprocs=args.world_size,
            start_method="fork",
        )


def main():
    torch.set_num_threads(1)  # a thread pool does not survive the fork
    for values in json.loads(Path(sys.argv[1]).read_text()):
        layout = SimpleNamespace(**values)
        args = make_args(layout)
        Path(layout.directory).mkdir(parents=True)
        fork_ranks(write_rank, args, layout)
        (Path(layout.directory) / "vocab_size").write_text(str(args.vocab_size))


if __name__ == "__main__":
    main()
